"""Tables of implementations: rows name functions, predicates, needs and traits of a module, which is imported late."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fl_dispatch import BackendImplKind, Traits
from fl_dispatch.backends.rows import Row, absent, implementations
from fl_dispatch.ops import OPERATORS

MODULE = """
from fl_dispatch import Traits

MISSING = [""]
TRAITS = Traits(chunk=64)

def silu_and_mul(x):
    return x

def other(x):
    return x

def takes(x):
    return True

def why_unavailable():
    return MISSING[0]
"""
ROW = Row("silu_and_mul", "activation", impl_id="default.acme", kind=BackendImplKind.DEFAULT)


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impl = tmp_path / "acme_rows" / "impl"
    impl.mkdir(parents=True)
    for folder in (impl.parent, impl):
        (folder / "__init__.py").touch()
    (impl / "activation.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("acme_rows", "acme_rows.impl", "acme_rows.impl.activation"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_row_takes_the_function_of_the_operators_name_or_the_one_behind_the_colon() -> None:
    rows = [ROW, replace(ROW, at="activation:other", impl_id="default.other")]
    assert [impl.fn.__name__ for impl in implementations(rows, "acme_rows")] == ["silu_and_mul", "other"]


def test_names_of_a_row_are_of_its_module() -> None:
    row = replace(ROW, supports="takes", traits="TRAITS")
    (impl,) = implementations([row], "acme_rows")
    module = sys.modules["acme_rows.impl.activation"]
    assert impl.supports is module.takes
    assert impl.traits == Traits(chunk=64)


def test_a_name_that_the_module_lacks_is_an_error_at_registration() -> None:
    with pytest.raises(AttributeError, match="suports"):
        implementations([replace(ROW, supports="suports")], "acme_rows")


def test_the_first_need_that_is_missing_says_why() -> None:
    here = [""]
    row = replace(ROW, needs=(lambda: here[0], "why_unavailable"))
    (impl,) = implementations([row], "acme_rows")
    assert impl.availability() == (True, "")
    sys.modules["acme_rows.impl.activation"].MISSING[0] = "the kernel is missing"
    assert impl.availability() == (False, "the kernel is missing")
    here[0] = "the library is missing"
    assert impl.availability() == (False, "the library is missing")


def test_rows_whose_modules_cannot_be_imported_have_the_reference_and_a_reason() -> None:
    (impl,) = absent([replace(ROW, at="no_such_module", needs=(lambda: "no compiler",))])
    assert impl.fn is OPERATORS["silu_and_mul"].reference
    assert impl.availability() == (False, "no compiler")
