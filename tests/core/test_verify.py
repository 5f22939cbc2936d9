"""Verification is red for everything that can be wrong with an implementation, and names it; green for a right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_cli import data, fl
from torch import Tensor
from torch.nn import functional

from builders import impl
from fl_dispatch import DispatchError, NotSupported, get_default_manager
from fl_dispatch.backends.reference.impl.attention import kv_cache_write
from fl_dispatch.evidence.pytest_plugin import verified
from fl_dispatch.evidence.verify import Verification, implementations, verify
from fl_dispatch.ops import OPERATORS, Sample

CPU = torch.device("cpu")


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype).contiguous()


def check(fn: Callable[..., Any], op: str = "silu_and_mul", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """Verify ``fn`` on the operator's smaller inputs."""
    manager = get_default_manager()
    manager.ensure_initialized()
    candidate = impl("default.tried", fn, op, **fields)
    manager.registry.register_impl(candidate)
    samples = OPERATORS[op].samples(dtype, CPU, torch.Generator().manual_seed(0))
    small = [sample for sample in samples if sum(a.numel() for a in sample.args if isinstance(a, Tensor)) < 40_000]
    return verify(manager, candidate, dtype, CPU, samples=small)


def only_problem(found: Verification) -> str:
    assert found.verdict == "wrong"
    return found.problems[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_implementation_is_right(dtype: torch.dtype) -> None:
    found = check(silu_and_mul, dtype=dtype)
    assert (found.verdict, found.problems, found.declined) == ("right", [], {})
    assert found.samples > 5
    assert 0 < found.worst.share <= 1


def test_one_wrong_element_is_named_with_its_input_and_its_tolerance() -> None:
    def wrong(x: Tensor) -> Tensor:
        y = silu_and_mul(x)
        if y.shape == (3, 67):
            y[1, 5] += 1e-3
        return y

    found = check(wrong)
    assert len(found.problems) == 1
    assert "odd width 67: output 0: 1 of 201 elements are wrong, the worst at [1, 5]" in only_problem(found)
    assert "times the tolerance" in only_problem(found)
    assert (found.worst.sample, found.worst.where) == ("odd width 67", "output 0 at [1, 5]")


def test_an_output_that_is_not_fully_written_is_found() -> None:
    def lazy(x: Tensor) -> Tensor:
        y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype)
        y[..., 1:] = silu_and_mul(x)[..., 1:]
        return y

    assert "elements are not written, or NaN" in only_problem(check(lazy))


def test_an_argument_that_must_only_be_read_may_not_change() -> None:
    def rude(x: Tensor) -> Tensor:
        y = silu_and_mul(x)
        x.mul_(2)
        return y

    assert "it changes 'x', which it must only read" in only_problem(check(rude))


def test_memory_beside_a_view_may_not_change() -> None:
    def sloppy(x: Tensor) -> Tensor:
        y = silu_and_mul(x)
        if not x.is_contiguous():
            x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)[-1] += 1
        return y

    found = check(sloppy)
    assert only_problem(found).startswith("row stride larger than the row: it changes memory around 'x'")


def test_other_bits_for_the_same_input_are_found_unless_declared() -> None:
    def noisy(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 1e-7 * torch.rand(()))

    assert "it gives other bits for the same input in call" in only_problem(check(noisy))


def test_an_implementation_may_declare_that_its_bits_vary() -> None:
    def noisy(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 1e-7 * torch.rand(()))

    assert check(noisy, properties={"deterministic": False}).verdict == "right"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: y.double(), "output 0 has the dtype float64, not float32"),
        (lambda y: y[..., :-1], "output 0 has the shape"),
        (lambda y: y.unsqueeze(0), "output 0 has the shape"),
        (lambda y: y.mT.contiguous().mT if y.dim() == 2 else y, "output 0 has the strides"),
        (lambda y: (y, y), "it returns 2 tensors, not 1"),
        (lambda y: None, "it returns 0 tensors, not 1"),
        (lambda y: 3, "it returns something that is no tensor"),
    ],
)
def test_an_output_of_another_dtype_shape_or_layout_is_named(change: Callable[[Tensor], Any], text: str) -> None:
    assert any(text in problem for problem in check(lambda x: change(silu_and_mul(x))).problems)


def test_state_that_the_call_does_not_address_may_not_change_at_all() -> None:
    def spill(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        kv_cache_write(key, value, key_cache, value_cache, slot_mapping)
        key_cache[-1, -1, -1, -1] += 1e-6

    assert "of 'key_cache' that the call does not address" in only_problem(check(spill, "kv_cache_write"))


def test_an_exception_is_a_finding_and_declining_is_not() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.dim() == 3:
            raise NotSupported("three dimensions")
        if not len(x):
            raise ZeroDivisionError("empty")
        return silu_and_mul(x)

    found = check(picky, supports=lambda x: x.shape[-1] != 134 or "odd width")
    assert found.problems == ["empty batch: it raised ZeroDivisionError: empty"]
    assert found.declined["odd width 67"] == "odd width"
    assert found.declined["3-d 2x5x64"] == "three dimensions"


def test_who_declines_everything_is_not_called_right() -> None:
    assert check(silu_and_mul, supports=lambda x: False).verdict == "nothing to run"


def test_results_over_arguments_that_may_be_overwritten_are_right() -> None:
    def in_place(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
        total = x.double() if residual is None else x.double() + residual.double()
        y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
        y = (y if weight is None else y * weight.double()).to(x.dtype).contiguous()
        if residual is None:
            return y
        return x.copy_(y), residual.copy_(total)

    assert check(in_place, "rms_norm").problems == []


def test_inputs_of_ones_own_can_be_given() -> None:
    manager = get_default_manager()
    (reference,) = implementations(manager, ["silu_and_mul"], ["reference.torch"])
    mine = [Sample("mine", (torch.randn(2, 6),))]
    found = verify(manager, reference, torch.float32, CPU, samples=mine)
    assert (found.samples, found.worst.sample) == (1, "mine")


def test_who_is_unknown_is_named() -> None:
    with pytest.raises(DispatchError, match=r"nobody registered an implementation 'vendor.nobody'"):
        implementations(get_default_manager(), impl_ids=["vendor.nobody"])
    with pytest.raises(DispatchError, match="'attention_backend' has no samples"):
        implementations(get_default_manager(), ["attention_backend"])


def test_a_vendor_verifies_in_two_lines() -> None:
    test = verified("reference.torch", operators=["silu_and_mul"], dtypes=[torch.float32])
    test("silu_and_mul", torch.float32)


def test_the_vendors_test_fails_with_the_finding() -> None:
    check(lambda x: silu_and_mul(x) + 1)
    with pytest.raises(AssertionError, match="elements are wrong, the worst at"):
        verified("default.tried", device="cpu")("silu_and_mul", torch.float32)


def test_the_command_is_green_for_the_reference_and_2_for_what_does_not_exist() -> None:
    (row,) = data("verify", "--op", "silu_and_mul", "--impl", "reference.torch", "--dtype", "float32")["results"]
    assert (row["verdict"], row["problems"]) == ("right", [])
    assert row["tolerance"] == {"rtol": 2e-5, "atol": 2e-6}
    done = fl("verify", "--impl", "vendor.nobody")
    assert done.returncode == 2
    assert "nobody registered" in done.stderr


def test_the_command_is_1_for_a_wrong_implementation(tmp_path: Any) -> None:
    (tmp_path / "wrong_silu.py").write_text(
        "from fl_dispatch import BackendImplKind, OpImpl\n"
        "def wrong(x):\n    return x.new_zeros((*x.shape[:-1], x.shape[-1] // 2))\n"
        "def register(registry):\n"
        "    registry.register_many([OpImpl('silu_and_mul', 'default.wrong', BackendImplKind.DEFAULT, wrong)])\n"
    )
    environment = {"VLLM_FL_PLUGIN_MODULES": "wrong_silu", "PYTHONPATH": str(tmp_path)}
    done = fl("verify", "--op", "silu_and_mul", "--impl", "default.wrong", "--dtype", "float32", **environment)
    assert done.returncode == 1
    assert "elements are wrong" in done.stdout
