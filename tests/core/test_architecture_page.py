"""Every module of the folders that ``docs/architecture.md`` and ``vllm_fl.compat`` list has its place there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
COMPAT = (ROOT / "src/vllm_fl/compat/__init__.py").read_text(encoding="utf-8")


def section(head: str) -> str:
    return PAGE.partition(f"\n## {head}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("fl_dispatch/hosting", section("What hosts share")),
        ("vllm_fl", section("The vLLM plugin")),
        ("sglang_fl", section("The SGLang plugin")),
        ("vllm_fl/compat", COMPAT),
    ],
)
def test_every_module_is_on_its_page(folder: str, text: str) -> None:
    named = set(re.findall(r"`([\w/]+)`", text))
    modules = {found.name for found in pkgutil.iter_modules([str(ROOT / "src" / folder)])}
    assert modules <= {name.strip("/").rpartition("/")[2] for name in named}
