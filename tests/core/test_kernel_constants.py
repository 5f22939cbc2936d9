"""Equal constants of Triton kernels have one number in PyTorch's table, so that equal layers are compiled once."""

from __future__ import annotations

from typing import Any

import pytest
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from fl_dispatch.hosting import kernel_constants


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_side_table, "constant_args", {})
    monkeypatch.setattr(kernel_side_table, "add_constant_args", kernel_side_table.add_constant_args)
    kernel_constants.share_equal()


def number(**constants: Any) -> int:
    return kernel_side_table.add_constant_args(constants)


def test_equal_constants_have_one_number() -> None:
    first = number(block=128, epsilon=1e-6, residual=None)
    assert number(block=128, epsilon=1e-6, residual=None) == first
    assert kernel_side_table.get_constant_args(first) == {"block": 128, "epsilon": 1e-6, "residual": None}


@pytest.mark.parametrize(("value", "other"), [(1, 2), (1, True), (1, 1.0), (0.0, -0.0), (None, False), ("1", 1)])
def test_others_do_not(value: Any, other: Any) -> None:
    first, second = number(block=value), number(block=other)
    assert first != second
    for known, expected in ((first, value), (second, other)):
        found = kernel_side_table.get_constant_args(known)["block"]
        assert (type(found), repr(found)) == (type(expected), repr(expected))


def test_names_count() -> None:
    assert number(rows=1) != number(columns=1)


def test_what_has_no_hash_keeps_a_number_of_its_own() -> None:
    assert number(shape=[1]) != number(shape=[1])


def test_a_table_is_prepared_once() -> None:
    prepared = kernel_side_table.add_constant_args
    kernel_constants.share_equal()
    assert kernel_side_table.add_constant_args is prepared
