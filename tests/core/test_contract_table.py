"""``docs/contract.md`` names tests that exist, and every test of the failure rules is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs" / "contract.md"
NAMED = re.compile(r"`([a-z_/]+)::(test_\w+)`")
# Areas of which the page lists each test, or BESIDE says why not.
COMPLETE = ["agreement", "compiled", "freezing", "poison", "recovery"]
BESIDE = {
    "recovery::test_arguments_that_cannot_be_written_do_not_hide_the_failure",
    "recovery::test_odd_exceptions_are_raised_as_they_are_and_fall_back_like_others",
    "recovery::test_an_operator_inside_an_operator_keeps_its_own_error",
    "poison::test_a_users_interrupt_while_a_plugin_loads_is_the_users",
    "poison::test_an_operator_that_always_fails_leaves_other_operators_alone",
}


def functions_of(area: str) -> set[str]:
    """The test functions in ``tests/core/test_<area>.py``."""
    path = TESTS / f"test_{area}.py"
    if not path.exists():
        return set()
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def rows() -> list[str]:
    rules = PAGE.read_text(encoding="utf-8").partition("\n## Stress")[0]
    return [line for line in rules.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("area", sorted({area for row in rows() for area, _ in NAMED.findall(row)}))
def test_every_test_that_the_page_names_exists(area: str) -> None:
    named = {test for row in rows() for other, test in NAMED.findall(row) if other == area}
    assert named - functions_of(area) == set()


def test_every_rule_names_a_test() -> None:
    rules = [row for row in rows() if not row.startswith("| rule |")]
    assert len(rules) > 70
    assert [row for row in rules if not NAMED.search(row.split("|")[-2])] == []


@pytest.mark.parametrize("area", COMPLETE)
def test_every_test_of_a_failure_rule_is_on_the_page(area: str) -> None:
    named = {test for row in rows() for other, test in NAMED.findall(row) if other == area}
    beside = {entry.partition("::")[2] for entry in BESIDE if entry.startswith(f"{area}::")}
    assert functions_of(area) - named == beside
