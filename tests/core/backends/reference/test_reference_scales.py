"""References are finite and right in half precision whatever the scale of the activations."""

from __future__ import annotations

import pytest
import test_references as references
import torch

from fl_dispatch.ops import OPERATORS

ROUTERS = ("topk_softmax", "topk_sigmoid", "grouped_topk")
LARGEST_SAMPLE = 1 << 14  # elements of a tensor; more of them show nothing new


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 300.0])
@references.each_operator
def test_a_reference_is_finite_and_right_at_any_scale_of_its_input(name: str, scale: float, dtype: torch.dtype) -> None:
    """The leading tensor of every sample is scaled; the result overflows only where the exact one does."""
    if name in ROUTERS and scale > 1:
        pytest.skip("saturated scores tie, and which expert of equals is taken is open")
    if name in ("index_key_write", "quantize", "rms_norm_quantize", "silu_and_mul_quantize", "scaled_moe"):
        pytest.skip("scaled inputs are rounded anew, and may lie between two quantized numbers")
    tolerance, largest = OPERATORS[name].tolerances[dtype], torch.finfo(dtype).max
    for sample in references.samples(name, dtype):
        args = list(references.all_arguments(name, sample))
        leading = next(index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        size = max(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
        if size > LARGEST_SAMPLE or not args[leading].is_floating_point() or args[leading].itemsize == 1:
            continue
        args[leading].mul_(scale)
        operands = OPERATORS[name].operands(tuple(args))
        expected = getattr(references, f"exact_{name}")(*map(references.double, operands))
        for got, wanted in zip(references.run(name, args), expected, strict=True):
            fits = wanted.abs() <= largest
            assert got[fits].isfinite().all(), sample.label
            error = (got.double() - wanted).abs()[fits]
            assert (error <= tolerance.atol + tolerance.rtol * wanted.abs()[fits]).all(), sample.label
