"""Inputs of products are those that the format's own library rounds to, in every type of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_dispatch.ops.quantization import ROUNDINGS, rounded
from quantized_checkpoints import MXFP4_ROWS, MXFP8_ROWS, NVFP4_ROWS, TOKEN8, rows_of_the_library

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [2.0**-9, 1.0, 30.0])


def given(dtype: torch.dtype, size: float) -> Tensor:
    """Random rows, one of zeros, one with a group of zeros, and one in the middles between two numbers."""
    x = torch.randn((40, 256), generator=torch.Generator().manual_seed(0))
    x[0], x[1, :32] = 0, 0
    x[2] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(32)
    return (x * size).to(dtype)


@DTYPES
@SIZES
def test_mxfp4(dtype: torch.dtype, size: float) -> None:
    x = given(dtype, size)
    assert torch.equal(rounded(x, "mxfp4").float(), rows_of_the_library(MXFP4_ROWS)(x.float()))


@DTYPES
@SIZES
@pytest.mark.parametrize("factor", [300.0, 12.8], ids=["a small range", "a large range"])
def test_nvfp4_with_its_factor(dtype: torch.dtype, size: float, factor: float) -> None:
    x, of_all = given(dtype, size), torch.tensor([factor])
    expected = rows_of_the_library(NVFP4_ROWS, of_all)(x.float())
    torch.testing.assert_close(rounded(x, "nvfp4", of_all).float() / of_all, expected, rtol=1e-6, atol=0)


@DTYPES
@SIZES
def test_mxfp8(dtype: torch.dtype, size: float) -> None:
    x = given(dtype, size)
    assert torch.equal(rounded(x, "mxfp8").float(), rows_of_the_library(MXFP8_ROWS)(x.float()).to(dtype).float())


@DTYPES
@SIZES
@pytest.mark.parametrize("shape", [(40, 256), (2, 20, 256), (2, 1, 20, 256)], ids=str)
def test_int8_with_a_scale_a_row(dtype: torch.dtype, size: float, shape: tuple[int, ...]) -> None:
    x = given(dtype, size)
    expected = rows_of_the_library(TOKEN8)(x.float().view(shape))
    assert torch.equal(rounded(x, "int8"), expected.view(x.shape).to(dtype))


every = pytest.mark.parametrize("numbers", ROUNDINGS)


@every
def test_no_rows(numbers: str) -> None:
    assert rounded(torch.zeros(0, 64), numbers).shape == (0, 64)


@every
def test_a_nan_does_not_vanish(numbers: str) -> None:
    x = torch.ones(1, 64)
    x[0, 3] = torch.nan
    assert rounded(x, numbers)[0, 3].isnan()


def test_each_row_has_its_factor() -> None:
    x, factors = given(torch.float32, 1.0)[:3], torch.tensor([300.0, 12.8, 1.0])
    alone = [rounded(x[row : row + 1], "nvfp4", factors[row : row + 1]) for row in range(3)]
    assert torch.equal(rounded(x, "nvfp4", factors), torch.cat(alone))


def test_other_numbers_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="'fp6'"):
        rounded(torch.ones(1, 64), "fp6")
