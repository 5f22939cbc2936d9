"""``docs/features.md`` says of no feature more than its data prove."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tool_modules import tool

ROOT = Path(__file__).parents[2]
features = tool("features")

PAGE = ROOT / "docs/features.md"
PLUGINS = {"vllm_cpu": ["vllm_fl"], "vllm_gpu": ["vllm_fl"], "sglang_cpu": ["sglang_fl"], "sglang_gpu": ["sglang_fl"]}
FOLDERS = {
    "vllm_cpu": ("vllm", "core"),
    "sglang_cpu": ("sglang", "core"),
    "vllm_gpu": ("gpu",),
    "sglang_gpu": ("gpu",),
    "ascend": ("npu", "npu_sglang"),
}
"""Column → folders of the tests that run there."""
CELLS = {
    (feature["name"], column): feature[column]
    for feature in features.DATA["feature"]
    for column in features.COLUMNS
    if column in feature
}
each = pytest.mark.parametrize(("column", "cell"), [(key[1], cell) for key, cell in CELLS.items()], ids=map(str, CELLS))


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def sources(package: str) -> str:
    return "".join(text(path) for path in (ROOT / "src" / package).rglob("*.py"))


def passed(test: str, record: str) -> bool:
    """Whether a record of a GPU run has a line of the test, or one below it, in which cases passed."""
    lines = text(ROOT / "benchmarks/results" / record).splitlines()
    near = (" ".join(lines[number : number + 3]) for number, line in enumerate(lines) if f"/{test}" in line)
    return any(re.search(r"\bpass(ed)?\b", found) for found in near)


def test_the_tables_are_those_of_the_data() -> None:
    page = text(PAGE)
    assert features.filled(page) == page, "python tools/features.py writes them"


def test_a_feature_has_known_columns_and_one_row() -> None:
    names = [feature["name"] for feature in features.DATA["feature"]]
    assert len(set(names)) == len(names)
    assert {key for feature in features.DATA["feature"] for key in feature} <= {"name", "link", *features.COLUMNS}


def test_the_table_is_one_screen() -> None:
    assert len(features.DATA["feature"]) <= 41
    assert all(len(feature["name"]) <= 34 for feature in features.DATA["feature"])


@each
def test_a_cell_has_what_its_word_promises(column: str, cell: dict[str, Any]) -> None:
    state = cell["state"]
    on_gpu = column.endswith("_gpu") and state in ("works", "part")
    assert set(cell) == {
        "state",
        *(["tests"] if state != "none" else []),
        *(["records"] if on_gpu else []),
        *(["note"] if state == "part" else []),
        *(["says"] if state == "refused" else []),
    } | {"by"} & set(cell)


@each
def test_what_works_was_seen_there(column: str, cell: dict[str, Any]) -> None:
    if cell["state"] in ("works", "part"):
        places = {
            path.relative_to(ROOT / "tests").parts[0] for test in cell["tests"] for path in (ROOT / "tests").rglob(test)
        }
        assert places & set(FOLDERS[column])
        for test in cell["tests"]:
            assert any((ROOT / "tests").rglob(test)), test
        for test in cell["tests"] if "records" in cell else ():
            assert any(passed(test, record) for record in cell["records"]), test


@each
def test_what_is_refused_is_refused_in_a_test_by_these_words(column: str, cell: dict[str, Any]) -> None:
    if cell["state"] == "refused":
        packages = [*PLUGINS.get(column, ["vllm_fl", "sglang_fl"]), "fl_dispatch/hosting"]
        assert cell.get("by") == "host" or any(cell["says"] in sources(package) for package in packages)
        for test in cell["tests"]:
            (found,) = (ROOT / "tests").rglob(test)
            assert cell["says"] in text(found).replace("\\", ""), test
