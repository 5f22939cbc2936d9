"""Verification finds wrong packings on a GPU, and a NaN stays one when rows are quantized there.

Marlin and Machete come with vLLM. The rest needs PyTorch and Triton alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from fl_dispatch import BackendImplKind, OpImpl, OpManager, get_default_manager, weight_forms
from fl_dispatch.evidence.verify import Verification, implementations, verify
from fl_dispatch.ops import OPERATORS, Sample
from wrong_packing import OPERATORS_WITH_WEIGHTS, planted, spoiled

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
VLLM = importlib.util.find_spec("vllm") is not None
MAKERS = {
    "weight_only_linear": {"_with_locks", "machete_numbers", "by_groups", "marlin_scales", "marlin_float_scales",
                           "marlin_zeros"},
}  # fmt: skip
"""Operator → packing functions of the kernels that vLLM brings."""


def inputs_of(op_name: str) -> list[Sample]:
    samples = OPERATORS[op_name].samples
    assert samples is not None
    every = samples(torch.float32, CUDA, torch.Generator().manual_seed(0))
    return [sample for sample in every if sample.serving][:2]


def with_forms(op_name: str, fault: str, make: Callable[[Tensor, Any], Any]) -> Verification:
    """Verify the reference with a form of each weight in its place, in a manager of its own."""
    manager, operator = OpManager(), OPERATORS[op_name]
    (reference,) = implementations(manager, [op_name], ["reference.torch"])
    names = [name for name in operator.operands(tuple(operator.parameters)) if name not in operator.later]

    def product(*args: Any) -> Any:
        values = dict(zip(names, args, strict=True))
        for name in set(operator.weights) & set(values):
            form = None if values[name] is None else weight_forms.of(values[name], f"default.{fault} {name}", make)
            values[name] = values[name] if form is None else form
        return reference.fn(*values.values())

    candidate = OpImpl(op_name, f"default.{fault}", BackendImplKind.DEFAULT, product, signature="unchecked")
    manager.registry.register_impl(candidate)
    return verify(manager, candidate, torch.float32, CUDA, samples=inputs_of(op_name), race_calls=8)


@pytest.mark.parametrize("op_name", OPERATORS_WITH_WEIGHTS)
def test_a_wrong_packing_of_weights_on_a_gpu_is_found(op_name: str) -> None:
    right = with_forms(op_name, "right", lambda weight, before: weight.clone())
    assert (right.problems, right.prepared, right.plain) == ([], right.samples, right.samples)
    wrong = with_forms(op_name, "wrong", lambda weight, before: spoiled(weight))
    assert wrong.verdict == "wrong"
    assert all("with prepared weights" in problem for problem in wrong.problems)
    stale = with_forms(op_name, "stale", lambda weight, before: weight.clone() if before is None else before)
    assert any("after its weights were written" in problem for problem in stale.problems)


@pytest.mark.skipif(not VLLM, reason="Marlin and Machete come with vLLM")
@pytest.mark.parametrize("op_name", OPERATORS_WITH_WEIGHTS)
def test_a_wrong_packing_of_each_kernel_that_prepares_is_found(op_name: str) -> None:
    assert planted(op_name, CUDA) == MAKERS.get(op_name, set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [0, 128, -1])
def test_a_nan_is_quantized_as_the_reference_quantizes_it(dtype: torch.dtype, group_size: int) -> None:
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).to(dtype).to(CUDA)
    x[2, 3], x[5, 200] = torch.nan, torch.inf
    same(x, group_size, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_is_quantized_as_the_reference_quantizes_it_with_a_scale_that_is_given(dtype: torch.dtype) -> None:
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).to(dtype).to(CUDA)
    x[2, 3], x[5, 200], x[6, 7] = torch.nan, torch.inf, -torch.inf
    same(x, 0, torch.tensor([0.01], device=CUDA))


def same(x: Tensor, group_size: int, scale: Tensor | None) -> None:
    """Both give the same numbers and scales, NaN where the other has it."""
    manager = get_default_manager()
    found = {}
    for name in ("reference.torch", "default.triton"):
        (one,) = implementations(manager, ["quantize"], [name])
        found[name] = one.fn(x.clone(), "float8_e4m3fn", group_size, scale)
    (right, scales), (given, given_scales) = found.values()
    torch.testing.assert_close(given_scales.float(), scales.float(), rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(given.float().isnan(), right.float().isnan())
    off = given.float().nan_to_num() - right.float().nan_to_num()
    assert float(off.abs().max()) <= 32, "a number at the border of two may be rounded to the other"
    assert float((off != 0).float().mean()) < 1e-3
