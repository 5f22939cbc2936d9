"""The forms of weights that vLLM's compiled kernels read, made without a GPU: those that vLLM itself makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp8
from vllm.scalar_type import scalar_types

from fl_dispatch.backends.vendor.cuda.impl import packed_weights, weight_only
from fl_dispatch.hosting.quantized import orders

INNER, COLUMNS = 256, 128


def numbers(bits: int) -> Tensor:
    """Numbers ``[columns, inner]`` from 0."""
    return torch.randint(0, 1 << bits, (COLUMNS, INNER), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("ours", "vllms"),
    [
        (packed_weights.FOUR_BITS, scalar_types.uint4b8),
        (packed_weights.FOUR_BITS_WITH_ZERO, scalar_types.uint4),
        (packed_weights.EIGHT_BITS, scalar_types.uint8b128),
        (packed_weights.FLOAT8, scalar_types.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_type_of_numbers_has_vllms_code(ours: packed_weights.NumberType, vllms: object) -> None:
    assert ours.code == vllms.id  # type: ignore[attr-defined]


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_the_numbers_of_a_column_from_the_lowest_bits_on(bits: int) -> None:
    words = packed_weights.words(orders.packed_weight(numbers(bits), bits))
    assert torch.equal(orders.unpack(words, bits, 0), numbers(bits).t())


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_scales_lie_as_marlins_threads_read_them(groups: int) -> None:
    scale = torch.randn(COLUMNS, groups, generator=torch.Generator().manual_seed(1)).bfloat16()
    size = INNER // groups if groups > 1 else -1
    right = marlin_utils.marlin_permute_scales(scale.t().contiguous(), INNER, COLUMNS, size)
    assert torch.equal(packed_weights.marlin_scales(scale, None), right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_fp8_have_the_exponents_difference(dtype: torch.dtype) -> None:
    scale = (torch.rand(COLUMNS, 1, generator=torch.Generator().manual_seed(1)) / 100).to(dtype)
    permuted = marlin_utils.marlin_permute_scales(scale.t().contiguous(), INNER, COLUMNS, -1)
    right = marlin_utils_fp8.fp8_fused_exponent_bias_into_scales(permuted)
    assert torch.equal(packed_weights.marlin_float_scales(scale, None), right)


def test_zero_points_lie_as_marlins_threads_read_them() -> None:
    zero = torch.randint(0, 16, (COLUMNS, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    right = marlin_utils.marlin_zero_points(zero.t().int().contiguous(), 4, COLUMNS, 4)
    assert torch.equal(packed_weights.marlin_zeros(zero, None), right)


def test_a_form_that_is_there_gets_new_contents_in_its_place() -> None:
    scale = torch.rand(COLUMNS, 2)
    first = packed_weights.by_groups(scale, None)
    again = packed_weights.by_groups(scale + 1, first)
    assert again is first
    assert torch.equal(again, (scale + 1).t())
    assert packed_weights.by_groups(torch.rand(COLUMNS, 4), first) is not first


@pytest.mark.parametrize("groups", [1, 2])
def test_a_form_has_memory_of_its_own_and_may_be_written_outside_of_inference(groups: int) -> None:
    scale = torch.rand(COLUMNS, groups)
    for make in (packed_weights.by_groups, packed_weights.marlin_scales):
        with torch.inference_mode():
            form = make(scale, None)
        assert form.untyped_storage().data_ptr() != scale.untyped_storage().data_ptr()
        assert make(scale, form) is form


def test_a_product_on_the_cpu_is_declined_with_a_reason() -> None:
    x, weight, scale = (
        torch.ones(2, INNER).half(),
        torch.zeros(COLUMNS, INNER // 2, dtype=torch.uint8),
        torch.ones(8, 1),
    )
    for supports in (weight_only.supports_marlin, weight_only.supports_machete):
        assert supports(x, weight, scale, zero=None) == "x is on cpu, not on a GPU"
