"""Which form of a quantized product runs. That they are right: test_triton.py, and tests/gpu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from fl_dispatch.backends.triton.impl import scaled, weight_only

FP8 = torch.float8_e4m3fn
HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that would run."""
    names: list[str] = []
    for module, kernels in ((scaled, ("row", "rows", "tiles")), (weight_only, ("row", "rows", "dequantize"))):
        for name in kernels:
            monkeypatch.setattr(module, f"_launch_{name}", lambda *args, name=name, **options: names.append(name))
    return names


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(0, []), (1, ["row"]), (2, ["rows"]), (scaled.SOME_ROWS, ["rows"]), (scaled.SOME_ROWS + 1, ["tiles"])],
)
def test_rows_decide_the_form_of_a_product_of_two_quantized_sides(
    rows: int, kernels: list[str], launched: list[str]
) -> None:
    x, weight = torch.zeros(rows, 64, dtype=FP8), torch.zeros(48, 64, dtype=FP8)
    found = scaled.scaled_linear(x, torch.ones(rows, 1), weight, torch.ones(48, 1))
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 48), torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "columns", "units", "tile"),
    [
        (4096, 4096, 132, scaled.TILES[0]),
        (256, 6144, 132, scaled.TILES[1]),
        (256, 4096, 132, scaled.TILES[2]),
        (65, 64, 132, scaled.TILES[-1]),
        (7, 28672, 132, (16, *scaled.WIDE)),
        (33, 4096, 132, (64, *scaled.NARROW)),
    ],
)
def test_a_tile_leaves_no_processor_idle_where_that_can_be(
    rows: int, columns: int, units: int, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled, "processors", lambda device: units)
    assert scaled._tile(rows, columns, torch.device("meta")) == tile


@pytest.mark.parametrize(
    ("rows", "group", "dtype", "kernels"),
    [
        (0, 64, HALF, []),
        (1, 64, HALF, ["row"]),
        (1, 24, SINGLE, ["row"]),
        (2, 64, HALF, ["rows"]),
        (2, 64, SINGLE, ["dequantize"]),
        (2, 16, HALF, ["dequantize"]),
        (weight_only.SOME_ROWS, 64, HALF, ["rows"]),
        (4 * weight_only.SOME_ROWS + 1, 64, HALF, ["dequantize"]),
    ],
)
def test_rows_groups_and_types_decide_how_few_bits_are_multiplied(
    rows: int, group: int, dtype: torch.dtype, kernels: list[str], launched: list[str]
) -> None:
    inner = 2 * group
    weight, scale = torch.zeros(40, inner // 2, dtype=torch.uint8), torch.ones(40, 2, dtype=dtype)
    found = weight_only.weight_only_linear(torch.zeros(rows, inner, dtype=dtype), weight, scale)
    assert launched == kernels
    assert (found.shape, found.dtype) == ((rows, 40), dtype)
