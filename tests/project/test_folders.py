"""Every folder of ``src`` states its purpose in a line; ``docs/evidence/core.md`` lists them from there."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
SECOND_NAME = SOURCES / "vllm_fl/dispatch"
"""``fl_dispatch`` under the name of the specification; its folders are those of ``fl_dispatch``."""

FOLDERS = sorted(
    folder
    for folder in {path.parent for path in SOURCES.rglob("*.py")}
    if not any(part.startswith(("_", ".")) or part.endswith(".in") for part in folder.parts)
    and folder != SECOND_NAME
    and SECOND_NAME not in folder.parents
    and any(folder.glob("__init__.py"))
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCES)))
def test_a_folder_states_its_purpose_in_one_sentence(folder: Path) -> None:
    purpose = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=\.)\s", purpose.partition("\n\n")[0])[0]
    assert re.fullmatch(r"[\w`][^\n]*(\n[^\n]+)?\.", first), purpose
    assert len(first) <= 240


def test_a_folder_without_a_docstring_would_be_found() -> None:
    assert len(FOLDERS) > 40


def test_every_difference_between_versions_of_vllm_is_listed_where_they_are() -> None:
    folder = SOURCES / "vllm_fl/compat"
    listed = set(re.findall(r"`([\w/]+)`", (folder / "__init__.py").read_text(encoding="utf-8")))
    modules = {found.name for found in pkgutil.iter_modules([str(folder)])}
    assert modules <= {name.strip("/").rpartition("/")[2] for name in listed}
