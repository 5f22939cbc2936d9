"""The mistakes that ``make mistakes`` plants can be planted; none is planted here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tool_modules import tool

ROOT = Path(__file__).parents[2]
mistakes = tool("mistakes")


@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda mistake: mistake.name)
def test_its_text_stands_once_and_its_test_is_there(mistake: Any) -> None:
    assert (ROOT / "src" / mistake.file).read_text(encoding="utf-8").count(mistake.right) == 1
    module, _, test = mistake.test.partition("::")
    function = test.rpartition("::")[2].partition("[")[0]
    assert (ROOT / module).exists()
    if "::" not in test:
        assert f"def {function}" in (ROOT / module).read_text(encoding="utf-8")
