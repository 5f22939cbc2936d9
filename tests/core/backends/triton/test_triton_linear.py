"""Which products with weights are kernels of ours, and which are PyTorch's. That they are right: test_triton.py."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from fl_dispatch.backends.triton.impl import launch
from fl_dispatch.backends.triton.impl.products import linear
from interpreting import run

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


@given(st.integers(1, 40_000))
def test_a_block_is_halved_only_where_more_than_an_eighth_of_its_lanes_would_idle(length: int) -> None:
    block, whole = launch.fitting(length, 4096), min(4096, launch.power_of_two(length))
    taken, before = (-(-length // size) * size for size in (block, whole))
    assert block in (whole, whole // 2)
    if block < whole:
        assert 7 * before > 8 * length
        assert taken < before
    else:
        assert 7 * taken <= 8 * length or -(-length // (whole // 2 or 1)) * (whole // 2 or 1) == taken


PROGRAM = """
import json, torch
from fl_dispatch.backends.triton.impl.products import linear, scaled_linear
from fl_dispatch.backends.triton.impl.rows import quantization

linear.ENOUGH = scaled_linear.ENOUGH = 1  # several columns a program, however few there are
torch.manual_seed(0)
torch.nn.functional.linear = None  # PyTorch's product takes no kernel's place
found = {}


def compare(name, result, expected):
    found[name] = float((result.double() - expected).abs().max() / expected.abs().max())


for dtype in (torch.float16, torch.float32):
    for inner in (1, 70, 1431, 2560, 5120):
        x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((1, inner), (7, inner), (7,)))
        expected = x.double() @ weight.double().T + bias.double()
        compare(f"{dtype} {inner}", linear.linear(x, weight, bias), expected)
for inner, block in ((1, 0), (70, 0), (4096, 0), (5120, 0), (8200, 0), (160, 32), (4224, 128)):
    for kind in ("int8", "float8_e4m3fn"):
        if block and kind == "int8":
            continue
        dtype = getattr(torch, kind)
        x = (torch.randn(1, inner) * 8).to(dtype)
        weight = (torch.randn(66, inner) * 8).to(dtype)
        size, repeats = (block, block) if block else (inner, 1)
        x_scale = torch.rand(1, -(-inner // size)) + 0.5
        scale = torch.rand(-(-66 // repeats), -(-inner // size)) + 0.5
        wide = lambda each, down: each.repeat_interleave(size, 1)[:, :inner].repeat_interleave(down, 0)
        left = x.double() * wide(x_scale, 1)
        right = weight.double() * wide(scale, repeats)[:66]
        bias = torch.randn(66)
        result = scaled_linear.scaled_linear(x, x_scale, weight, scale, bias, "float32", block)
        compare(f"{kind} {inner} {block}", result, left @ right.T + bias.double())
print(json.dumps(found))
"""


def test_one_row_is_right_with_several_columns_a_program_and_whatever_their_length_is() -> None:
    found = json.loads(run(PROGRAM).splitlines()[-1])
    assert len(found) == 22
    assert {name: error for name, error in found.items() if not error <= 1e-3} == {}
