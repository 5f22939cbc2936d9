"""A result that is not as declared is a failure of the implementation that returned it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import BrokenPromiseError, SelectionPolicy
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.manager import OpManager
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.results import broken_promise

Tensor = torch.Tensor
REFERENCE = ReferenceBackend()


def manager(op: str, fn: Callable[..., Any], **policy: Any) -> OpManager:
    other = impl("reference.torch", getattr(REFERENCE, op), op=op)
    return manager_of(impl("vendor.nimbus.fast", fn, op=op), other, policy=SelectionPolicy(**policy))


def right(x: Tensor) -> Tensor:
    return REFERENCE.silu_and_mul(x)


BROKEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dtype": (lambda x: right(x).bfloat16(), "result 0 has dtype bfloat16, float32 is declared"),
    "shape": (lambda x: right(x)[:1], r"result 0 has shape \(1, 4\), \(3, 4\) is declared"),
    "strides": (lambda x: right(x).t().contiguous().t(), r"result 0 has strides \(1, 3\), \(4, 1\) is declared"),
    "layout": (lambda x: right(x).to_sparse(), "result 0 has layout sparse_coo, strided is declared"),
    "number": (lambda x: (right(x), right(x)), "it returns 2 tensors, not 1"),
    "nothing": (lambda x: None, "it returns 0 tensors, not 1"),
    "no tensor": (lambda x: "y", "it returns something that is no tensor: str"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_result_that_is_not_as_declared_is_a_failure_that_names_the_implementation(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    fn, problem = BROKEN[broken]
    made, x = manager("silu_and_mul", fn), torch.randn(3, 8)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(made.call("silu_and_mul", x), right(x))
    assert made.get_failed_impls() == {"silu_and_mul": {"vendor.nimbus.fast"}}
    strict = manager("silu_and_mul", fn, strict=True)
    with pytest.raises(BrokenPromiseError, match=f"vendor.nimbus.fast of silu_and_mul: {problem}"):
        strict.call("silu_and_mul", x)
    assert "vendor.nimbus.fast of silu_and_mul" in caplog.text


def test_after_a_broken_promise_the_next_implementation_runs_on_the_original_values() -> None:
    def overwrites(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        residual.fill_(9.0)
        return x.fill_(7.0).bfloat16(), residual

    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.ones(8)
    expected = REFERENCE.rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    made = manager_of(
        impl("vendor.nimbus", overwrites, op="rms_norm", signature="unchecked"),
        impl("reference.torch", REFERENCE.rms_norm, op="rms_norm"),
    )
    torch.testing.assert_close(made.call("rms_norm", x, residual, weight, 1e-6), expected)


def test_a_broken_promise_bans_for_that_kind_of_arguments_only() -> None:
    half_wrong = manager("silu_and_mul", lambda x: right(x) if x.dtype is torch.float32 else right(x).float())
    half_wrong.call("silu_and_mul", torch.ones(2, 8, dtype=torch.bfloat16))
    assert half_wrong.get_selected_impl_id("silu_and_mul", torch.ones(2, 8)) == "vendor.nimbus.fast"
    banned = torch.ones(2, 8, dtype=torch.bfloat16)
    assert half_wrong.get_selected_impl_id("silu_and_mul", banned) == "reference.torch"


def test_a_broken_promise_is_no_proof_and_a_kept_one_is() -> None:
    made, x = manager("silu_and_mul", right), torch.randn(3, 8)
    made.call("silu_and_mul", x)
    assert made.state.proofs.holds(made.registry.get_implementation("silu_and_mul", "vendor.nimbus.fast"), wrote=False)
    wrong = manager("silu_and_mul", BROKEN["dtype"][0])
    wrong.call("silu_and_mul", x)
    lying = wrong.registry.get_implementation("silu_and_mul", "vendor.nimbus.fast")
    assert not wrong.state.proofs.holds(lying, wrote=False)


@pytest.mark.parametrize(
    ("shape", "fn"),
    [
        ((1, 8), lambda x: torch.empty_strided((1, 4), (99, 1)).copy_(right(x))),
        ((0, 8), lambda x: torch.empty_strided((0, 4), (1, 77))),
    ],
    ids=["a dimension of one element", "no element"],
)
def test_strides_that_nobody_can_see_are_free(shape: tuple[int, int], fn: Callable[[Tensor], Tensor]) -> None:
    made = manager("silu_and_mul", fn)
    made.call("silu_and_mul", torch.randn(shape))
    assert made.get_failed_impls() == {}


@pytest.mark.parametrize("result", [lambda x, s: (x, s), lambda x, s: (x.view_as(x), s.view_as(s))], ids=["it", "view"])
def test_a_result_in_an_argument_lies_as_the_argument_does(result: Callable[[Tensor, Tensor], Any]) -> None:
    x, residual = torch.randn(3, 16)[:, :8], torch.randn(3, 24)[:, :8]
    args = (x, residual, torch.ones(8), 1e-6)
    assert broken_promise(OPERATORS["rms_norm"], args, result(x, residual)) == ""
    assert "strides" in broken_promise(OPERATORS["rms_norm"], args, result(torch.randn(3, 16)[:, :8], residual))


def test_nothing_is_promised_for_an_operator_that_nobody_declared() -> None:
    made = manager_of(impl("vendor.nimbus", lambda x: "anything", op="own_operator"))
    assert made.call("own_operator", torch.ones(1)) == "anything"
