"""Equal launches of Triton kernels have equal numbers in PyTorch's table, so that equal layers are compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.runtime.jit import JITFunction

from fl_dispatch.hosting.compilation import kernel_numbers


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("constant_args", "id_to_kernel", "kernel_to_id"):
        monkeypatch.setattr(kernel_side_table, content, {})
    for method in ("add_constant_args", "add_kernel"):
        monkeypatch.setattr(kernel_side_table, method, getattr(kernel_side_table, method))
    kernel_numbers.share_equal()


def number(**constants: Any) -> int:
    return kernel_side_table.add_constant_args(constants)


def constexprs(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    value, other = map(triton.language.constexpr, pair)
    return value, other


def test_equal_constants_have_one_number() -> None:
    first = number(block=128, epsilon=1e-6, residual=None)
    assert number(block=128, epsilon=1e-6, residual=None) == first
    assert kernel_side_table.get_constant_args(first) == {"block": 128, "epsilon": 1e-6, "residual": None}


PAIRS = [(1, 2), (1, True), (1, 1.0), (0.0, -0.0), (None, False), ("1", 1), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(
    ("value", "other"), [*PAIRS, *(((value,), (other,)) for value, other in PAIRS), *map(constexprs, PAIRS)], ids=str
)
def test_others_do_not(value: Any, other: Any) -> None:
    first, second = number(block=value), number(block=other)
    assert first != second
    for known, expected in ((first, value), (second, other)):
        found = kernel_side_table.get_constant_args(known)["block"]
        assert (type(found), repr(found)) == (type(expected), repr(expected))


def test_types_count() -> None:
    assert number(dtype=torch.float16) == number(dtype=torch.float16)
    assert number(dtype=torch.float16) != number(dtype="torch.float16")


def test_names_count() -> None:
    assert number(rows=1) != number(columns=1)


@pytest.mark.parametrize("value", [[1], (1,), triton.language.constexpr(1)])
def test_what_is_of_no_plain_type_keeps_a_number_of_its_own(value: Any) -> None:
    assert number(shape=value) != number(shape=value)


def test_numbers_do_not_outlive_the_table() -> None:
    first, kernel = number(block=128), kernel_side_table.add_kernel(wrapped(num_warps=8))
    kernel_side_table.reset_table()
    other, another = wrapped(num_warps=4), wrapped(num_warps=8)
    assert (number(block=256), kernel_side_table.add_kernel(other)) == (first, kernel)
    assert kernel_side_table.get_constant_args(number(block=128)) == {"block": 128}
    assert kernel_side_table.get_kernel(kernel_side_table.add_kernel(another)) is another


def copy(x: Any, y: Any, block: triton.language.constexpr) -> None:
    places = triton.language.arange(0, block)
    triton.language.store(y + places, triton.language.load(x + places))


KERNEL, OTHER = JITFunction(copy), JITFunction(copy)


def wrapped(
    kernel: Any = KERNEL, key: tuple[str, ...] = (), hook: Any = None, asked: Any = None, **options: Any
) -> Any:
    """The kernel as Dynamo wraps it for a launch with options."""
    config = triton.Config({}, pre_hook=hook, **options)
    vars(config).update(asked or {})
    return triton.autotune([config], key=list(key))(kernel)


def test_a_kernel_that_each_launch_wraps_has_one_number() -> None:
    first = wrapped(num_warps=8)
    number = kernel_side_table.add_kernel(first)
    assert kernel_side_table.add_kernel(wrapped(num_warps=8)) == number
    assert kernel_side_table.get_kernel(number) is first


@pytest.mark.parametrize(
    "others",
    [
        {"num_warps": 4},
        {"num_warps": 8, "num_stages": 5},
        {"num_warps": 8, "kernel": OTHER},
        {"num_warps": 8, "key": ("block",)},
        {"num_warps": 8, "hook": print},
        {"num_warps": 8, "asked": {"num_cpu_threads": 8}},
    ],
    ids=["warps", "stages", "kernel", "tuned by a size", "with a hook", "an option of the launch alone"],
)
def test_another_kernel_has_another_number(others: dict[str, Any]) -> None:
    first, second = kernel_side_table.add_kernel(wrapped(num_warps=8)), kernel_side_table.add_kernel(wrapped(**others))
    assert first != second
    assert kernel_side_table.add_kernel(KERNEL) not in (first, second)


def test_a_table_is_prepared_once() -> None:
    prepared = kernel_side_table.add_constant_args, kernel_side_table.add_kernel
    kernel_numbers.share_equal()
    assert prepared == (kernel_side_table.add_constant_args, kernel_side_table.add_kernel)


def test_another_pytorch_ends_nothing_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(triton_kernel_wrap, "kernel_side_table")
    with caplog.at_level("INFO"):
        kernel_numbers.share_equal()
    assert "compiled one by one: AttributeError" in caplog.text
