"""Which products with weights are kernels of ours, and which are PyTorch's. That they are right: test_triton.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from fl_dispatch.backends.triton.impl import linear

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that would run."""
    names: list[str] = []
    for name in ("row", "rows"):
        monkeypatch.setattr(linear, f"_launch_{name}", lambda *args, name=name, **options: names.append(name))
    return names


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "dtype", "kernels"),
    [
        (1, 64, 2048, HALF, ["row"]),
        (1, 64, 2048, torch.bfloat16, ["row"]),
        (1, 1, 70, SINGLE, ["row"]),
        (1, 64, 70, DOUBLE, []),
        (2, 96, 384, HALF, ["rows"]),
        (2, 96, 384, SINGLE, []),
        (linear.MOST_ROWS, 100, 200, HALF, ["rows"]),
        (linear.MOST_ROWS + 1, 100, 200, HALF, []),
        (0, 96, 128, HALF, []),
    ],
)
def test_few_rows_are_ours(
    rows: int, columns: int, inner: int, dtype: torch.dtype, kernels: list[str], launched: list[str]
) -> None:
    found = linear.linear(torch.zeros(rows, inner, dtype=dtype), torch.zeros(columns, inner, dtype=dtype))
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, columns), dtype)


def test_large_weights_are_pytorchs_from_two_rows_on(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALL_WEIGHTS", 64 * 64 - 1)
    for rows in (2, 1):
        linear.linear(torch.zeros(rows, 64, dtype=HALF), torch.zeros(64, 64, dtype=HALF))
    assert launched == ["row"]


def test_long_columns_are_pytorchs_unless_they_are_many(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SHORT", 63)
    monkeypatch.setattr(linear, "MANY_COLUMNS", 65)
    for rows, columns, inner in ((2, 64, 64), (2, 65, 64), (2, 64, 63), (1, 64, 64)):
        launched.append(f"{rows} {columns} {inner}")
        linear.linear(torch.zeros(rows, inner, dtype=HALF), torch.zeros(columns, inner, dtype=HALF))
    assert launched == ["2 64 64", "2 65 64", "rows", "2 64 63", "rows", "1 64 64", "row"]


def test_a_device_with_little_shared_memory_multiplies_single_rows_alone(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "shared_memory", lambda device: 99 << 10)
    for rows in (2, 1):
        linear.linear(torch.zeros(rows, 64, dtype=HALF), torch.zeros(64, 64, dtype=HALF))
    assert launched == ["row"]


@pytest.mark.parametrize("rows", [1, 2])
def test_elements_that_do_not_lie_side_by_side_are_pytorchs(rows: int, launched: list[str]) -> None:
    x, weight, bias = torch.randn(rows, 8), torch.randn(6, 8), torch.randn(6)
    strided = torch.randn(rows, 16)[:, ::2], torch.randn(8, 6).t(), torch.randn(12)[::2]
    for arguments in ((strided[0], weight, bias), (x, strided[1], bias), (x, weight, strided[2])):
        assert torch.equal(linear.linear(*arguments), torch.nn.functional.linear(*arguments))
    assert launched == []


X, WEIGHT, BIAS = torch.ones(2, 8, dtype=HALF), torch.ones(6, 8, dtype=HALF), torch.ones(6, dtype=HALF)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(2, 4, dtype=HALF)},
        {"x": torch.ones(2, 16, dtype=HALF)},
        {"weight": WEIGHT.float()},
        {"bias": BIAS[:2]},
        {"bias": BIAS.float()},
    ],
    ids=["narrow", "wide", "other dtype", "short bias", "bias of another dtype"],
)
def test_what_pytorch_refuses_raises_its_error(rows: int, change: dict[str, torch.Tensor], launched: list[str]) -> None:
    arguments = {"x": X, "weight": WEIGHT, "bias": BIAS, **change}
    arguments["x"] = arguments["x"][:rows]
    with pytest.raises(RuntimeError):
        linear.linear(**arguments)
    assert launched == []


def test_a_weight_elsewhere_never_reaches_a_kernel(launched: list[str]) -> None:
    for rows in (1, 2):
        linear.linear(X[:rows], torch.empty(6, 8, dtype=HALF, device="meta"))
    assert launched == []


def test_a_bias_of_one_element_is_pytorchs_which_spreads_it(launched: list[str]) -> None:
    found = linear.linear(X[:1], WEIGHT, BIAS[:1])
    assert torch.equal(found, torch.full((1, 6), 9, dtype=HALF))
    assert launched == []
