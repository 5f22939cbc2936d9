"""Verification finds every planted fault, and blames no right implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_faults import FAULTS, REFERENCE, Fault
from torch import Tensor

from builders import impl
from command import fl
from fl_dispatch import get_default_manager
from fl_dispatch.evidence.inputs import Inputs
from fl_dispatch.evidence.verify import Verification, implementations, verify
from fl_dispatch.ops import OPERATORS, Sample

CPU = torch.device("cpu")


def found(op: str, function: Any, dtype: torch.dtype, **options: Any) -> Verification:
    manager = get_default_manager()
    manager.ensure_initialized()
    candidate = impl("default.tried", function, op, signature="unchecked")
    manager.registry.register_impl(candidate)
    return verify(manager, candidate, dtype, CPU, **options)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op}: {fault.name}")
def test_a_planted_fault_is_found(fault: Fault) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    inputs = Inputs(manager, fault.op, fault.dtype, CPU, probes=fault.probes)
    result = found(fault.op, fault.implementation(), fault.dtype, inputs=inputs)
    assert result.verdict == "wrong"
    unrelated = ("it raised TypeError", "it raised ValueError")
    assert not any(text in problem for problem in result.problems for text in unrelated)


@pytest.mark.parametrize("op", sorted({fault.op for fault in FAULTS}))
def test_without_its_fault_the_same_implementation_is_right(op: str) -> None:
    right = Fault("none", op, torch.bfloat16, lambda call, given: call(given))
    assert found(op, right.implementation(), right.dtype).problems == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_implementation_that_is_right_but_not_bit_exact_is_not_blamed(dtype: torch.dtype) -> None:
    def summed_in_another_order(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = sum(part @ half.mT for part, half in zip(x.float().chunk(2, -1), weight.float().chunk(2, -1), strict=True))
        return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()

    result = found("linear", summed_in_another_order, dtype)
    assert result.problems == []
    assert result.worst.share > 0


def test_an_implementation_that_rounds_before_the_product_with_the_weight_is_not_blamed() -> None:
    def rounded_twice(gated: Tensor) -> Tensor:
        gate, up = gated.chunk(2, -1)
        return (torch.nn.functional.silu(gate.float()).to(gated.dtype) * up).contiguous()

    result = found("silu_and_mul", rounded_twice, torch.bfloat16)
    assert result.problems == []
    assert 0.25 < result.rounding.mean < OPERATORS["silu_and_mul"].mean_error


def test_the_rounding_of_a_single_row_is_not_judged_because_its_elements_have_a_factor_in_common() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    reference = next(i for i in manager.registry.get_implementations("rms_norm") if i.impl_id == "reference.torch")
    generator = torch.Generator().manual_seed(15)  # a factor with which the first of two roundings costs much
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((1, 4096), (4096,)))
    sample = Sample("one row", (x, None, weight, 1e-6))
    result = verify(manager, reference, torch.bfloat16, CPU, samples=[sample], race_calls=0)
    assert result.rounding.mean > OPERATORS["rms_norm"].mean_error
    assert result.problems == []


def test_an_implementation_whose_bits_vary_within_rounding_is_not_blamed_if_it_says_so() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    varying = impl(
        "default.tried", lambda x: REFERENCE.silu_and_mul(x) * (1 + 1e-7 * torch.rand(())), "silu_and_mul",
        properties={"deterministic": False},
    )  # fmt: skip
    manager.registry.register_impl(varying)
    result = verify(manager, varying, torch.float32, CPU)
    assert result.problems == []
    assert result.calls > 1, "it was called again, under load"


def test_results_in_place_of_strided_arguments_are_not_blamed() -> None:
    def in_place(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
        y = REFERENCE.rms_norm(x, residual, weight, epsilon)
        return y if residual is None else (x.copy_(y[0]), residual.copy_(y[1]))

    assert found("rms_norm", in_place, torch.bfloat16).problems == []


def test_the_shipped_template_is_right() -> None:
    done = fl("verify", "--impl", "vendor.template", FL_DISPATCH_TEMPLATE="1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("right") == 6


def test_a_fault_in_compiled_code_only_is_found_there_only() -> None:
    def lazy(x: Tensor) -> Tensor:
        y = REFERENCE.silu_and_mul(x)
        return y + 1 if torch.compiler.is_dynamo_compiling() else y

    manager = get_default_manager()
    result = found("silu_and_mul", lazy, torch.float32)
    (candidate,) = implementations(manager, ["silu_and_mul"], ["default.tried"])
    samples = list(OPERATORS["silu_and_mul"].samples(torch.float32, CPU, torch.Generator().manual_seed(0)))[:2]
    compiled = verify(manager, candidate, torch.float32, CPU, samples=samples, compiled="eager")
    assert (result.verdict, compiled.verdict, compiled.how) == ("right", "wrong", "eager")
