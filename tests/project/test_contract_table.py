"""``docs/evidence/contract.md`` names tests that exist, and every test of the failure rules is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/evidence/contract.md"
NAMED = re.compile(r"`([a-z_/]+)::(test_\w+)`")
ATTACKS = [f"attacks_{what}" for what in ("binding", "compiled", "policy", "recovery", "snapshots")]
COMPLETE = ["agreement", "compiled", "freezing", "poison", "promises", "recovery", "untraceable", *ATTACKS]
"""Areas whose tests are all on the page, but for those in BESIDE."""

BESIDE = {
    "recovery::test_arguments_that_cannot_be_written_do_not_hide_the_failure",
    "recovery::test_odd_exceptions_are_raised_as_they_are_and_fall_back_like_others",
    "recovery::test_an_operator_inside_an_operator_keeps_its_own_error",
    "poison::test_a_users_interrupt_while_a_plugin_loads_is_the_users",
    "poison::test_an_operator_that_always_fails_leaves_other_operators_alone",
}


def functions_of(area: str) -> set[str]:
    """The test functions in ``test_<area>.py``, in whichever folder of ``tests/core``."""
    return {
        node.name
        for path in (ROOT / "tests/core").rglob(f"test_{area}.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def rules() -> dict[str, list[tuple[str, str]]]:
    """Each rule of the page and the tests below it, as ``(area, test)``."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").partition("\n## Stress")[0].splitlines():
        if line.startswith("- "):
            found[line] = []
        elif line.startswith("  - "):
            found[next(reversed(found))] += NAMED.findall(line)
    return found


def named(area: str) -> set[str]:
    return {test for tests in rules().values() for other, test in tests if other == area}


@pytest.mark.parametrize("area", sorted({area for tests in rules().values() for area, _ in tests}))
def test_every_test_that_the_page_names_exists(area: str) -> None:
    assert named(area) - functions_of(area) == set()


def test_every_rule_names_a_test() -> None:
    assert len(rules()) > 100
    assert [rule for rule, tests in rules().items() if not tests] == []


@pytest.mark.parametrize("area", COMPLETE)
def test_every_test_of_a_failure_rule_is_on_the_page(area: str) -> None:
    beside = {entry.partition("::")[2] for entry in BESIDE if entry.startswith(f"{area}::")}
    assert functions_of(area) - named(area) == beside
