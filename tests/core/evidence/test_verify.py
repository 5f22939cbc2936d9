"""Verification is red for everything that can be wrong with an implementation, and names it; green for a right one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from builders import impl
from command import fl
from fl_dispatch import DispatchError, NotSupported, call_op, get_default_manager
from fl_dispatch.evidence.arguments import same_bits
from fl_dispatch.evidence.pytest_plugin import verified
from fl_dispatch.evidence.verify import Verification, implementations, verify
from fl_dispatch.ops import FEW_TERMS, OPERATORS, Sample
from fl_dispatch.ops.results import errors

CPU = torch.device("cpu")


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype).contiguous()


def check(
    fn: Callable[..., Any],
    op: str = "silu_and_mul",
    dtype: torch.dtype = torch.float32,
    samples: list[Sample] | None = None,
    **fields: Any,
) -> Any:
    """Verify ``fn`` on the operator's smaller inputs."""
    manager = get_default_manager()
    manager.ensure_initialized()
    candidate = impl("default.tried", fn, op, **fields)
    manager.registry.register_impl(candidate)
    if samples is None:
        every = OPERATORS[op].samples(dtype, CPU, torch.Generator().manual_seed(0))
        samples = [sample for sample in every if sum(a.numel() for a in sample.args if isinstance(a, Tensor)) < 40_000]
    return verify(manager, candidate, dtype, CPU, samples=samples)


def problem_of(found: Verification, label: str) -> str:
    return next(problem for problem in found.problems if problem.startswith(label))


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

    assert "4 of 512 elements are not written, the first at [0, 0]" in problem_of(check(lazy), "scale 0.0001")


def test_nan_is_told_from_what_is_not_written() -> None:
    def hot(x: Tensor) -> Tensor:
        y = silu_and_mul(x)
        y[y > 100] = torch.nan
        return y

    assert "elements are NaN, the first at" in only_problem(check(hot))


def test_a_finding_names_the_input_so_that_it_can_be_run_again() -> None:
    found = check(lambda x: silu_and_mul(x) + 1, samples=[Sample("mine", (torch.randn(4, 320)[:, :256],))])
    assert found.failed == {"mine": "x float32 [4, 256] strides (320, 1)"}
    assert found.as_data()["seed"] == 0


def test_a_predicate_that_raises_is_a_finding_and_not_the_end() -> None:
    found = check(silu_and_mul, supports=lambda x: x.no_such_attribute if x.dim() == 3 else True)
    assert "its 'supports' raised AttributeError" in only_problem(found)
    assert found.samples > 5


def test_an_error_under_load_is_a_finding() -> None:
    calls = itertools.count()

    def tired(x: Tensor) -> Tensor:
        if next(calls) > 60:
            raise RuntimeError("tired")
        return silu_and_mul(x)

    assert "under load raised RuntimeError: tired" in only_problem(check(tired))


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
            x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)[-1] = 0
        return y

    found = check(sloppy)
    assert only_problem(found).startswith("row stride larger than the row: it changes memory around 'x'")


def test_other_bits_for_the_same_input_are_found_unless_declared() -> None:
    def noisy(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 1e-7 * torch.rand(()))

    assert "it gives other bits for the same input in call" in only_problem(check(noisy))


def test_a_nan_of_other_bits_is_the_same_result() -> None:
    quiet, all_ones = (torch.tensor([bits, 0x3C00], dtype=torch.int16).view(torch.float16) for bits in (0x7E00, 0x7FFF))
    assert quiet.isnan().tolist() == all_ones.isnan().tolist() == [True, False]
    assert same_bits([quiet], [all_ones])
    assert not same_bits([quiet], [quiet.nan_to_num(1.0)])
    assert not same_bits([quiet], [torch.stack([all_ones[0], -all_ones[1]])])
    assert not same_bits([torch.tensor([0.0, torch.nan])], [torch.tensor([-0.0, torch.nan])])


def test_an_implementation_may_declare_that_its_bits_vary() -> None:
    def noisy(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 1e-7 * torch.rand(()))

    assert check(noisy, properties={"deterministic": False}).verdict == "right"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: y.double(), "result 0 has dtype float64, float32 is declared"),
        (lambda y: y[..., :-1], "result 0 has shape"),
        (lambda y: y.unsqueeze(0), "result 0 has shape"),
        (lambda y: y.mT.contiguous().mT if y.dim() == 2 else y, "result 0 has strides"),
        (lambda y: (y, y), "it returns 2 tensors, not 1"),
        (lambda y: None, "it returns 0 tensors, not 1"),
        (lambda y: 3, "it returns something that is no tensor"),
    ],
)
def test_an_output_of_another_dtype_shape_or_layout_is_named(change: Callable[[Tensor], Any], text: str) -> None:
    assert any(text in problem for problem in check(lambda x: change(silu_and_mul(x))).problems)


def test_state_that_the_call_does_not_address_may_not_change_at_all() -> None:
    def spill(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        OPERATORS["kv_cache_write"].reference(key, value, key_cache, value_cache, slot_mapping)
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
    with pytest.raises(DispatchError, match=r"no backend registered an implementation 'vendor.nobody'"):
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


def test_a_vendors_test_takes_inputs_dtypes_and_a_seed() -> None:
    mine = [Sample("mine", (torch.randn(2, 6),))]
    asked = []

    def samples(*place: Any) -> list[Sample]:
        asked.append(place)
        return mine

    test = verified("reference.torch", operators=["silu_and_mul"], samples=samples, seed=3, device="cpu")
    test("silu_and_mul", torch.float32)
    assert asked == [("silu_and_mul", torch.float32, CPU)]


def test_a_vendors_test_is_red_where_nothing_can_be_verified() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    absent = impl("default.absent", silu_and_mul, "silu_and_mul", available=lambda: False)
    manager.registry.register_many(
        [absent, impl("default.shy", silu_and_mul, "silu_and_mul", supports=lambda x: False)]
    )
    for impl_id, text in (("default.absent", "is not available"), ("default.shy", "takes none of the inputs")):
        with pytest.raises(pytest.fail.Exception, match=text):
            verified(impl_id, device="cpu")("silu_and_mul", torch.float32)
    with pytest.raises(pytest.skip.Exception, match="is not available"):
        verified("default.absent", may_be_absent=True)("silu_and_mul", torch.float32)


def test_the_command_is_green_for_the_reference_and_2_for_what_does_not_exist() -> None:
    chosen = ("--op", "silu_and_mul", "--impl", "reference.torch", "--dtype", "float32", "--json")
    (row,) = json.loads(fl("verify", *chosen).stdout)["results"]
    assert (row["verdict"], row["problems"]) == ("right", [])
    assert row["tolerance"] == {"rtol": 2e-5, "atol": 2e-6}
    done = fl("verify", "--impl", "vendor.nobody")
    assert done.returncode == 2
    assert "no backend registered" in done.stderr


PLUGIN = """
import os, time, torch
from fl_dispatch import BackendImplKind, OpImpl

def wrong(x):
    return x.new_zeros((*x.shape[:-1], x.shape[-1] // 2))

def slow(x):
    time.sleep(float(os.environ.get("SLOW", "0")))
    return wrong(x)

def broken(x):
    raise ValueError("broken")

def register(registry):
    registry.register_many([
        OpImpl("silu_and_mul", "default.wrong", BackendImplKind.DEFAULT, slow),
        OpImpl("silu_and_mul", "default.broken", BackendImplKind.DEFAULT, slow, supports=broken),
        OpImpl("silu_and_mul", "default.absent", BackendImplKind.DEFAULT, slow, available=lambda: False),
        OpImpl("silu_and_mul", "default.shy", BackendImplKind.DEFAULT, slow, supports=lambda x: "never"),
    ])
"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """An environment with implementations that are wrong in some way."""
    (tmp_path / "wrong_silu.py").write_text(PLUGIN)
    return {"VLLM_FL_PLUGIN_MODULES": "wrong_silu", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_the_command_is_1_for_a_wrong_implementation_and_names_the_input(plugin: dict[str, str]) -> None:
    done = fl("verify", "--op", "silu_and_mul", "--impl", "default.wrong", "--dtype", "float32", "--quick", **plugin)
    assert done.returncode == 1
    assert "elements are wrong" in done.stdout
    assert "input: x float32 [1, 8192]; again: fl verify --op silu_and_mul --impl default.wrong" in done.stdout
    again = fl("verify", "--op", "silu_and_mul", "--impl", "default.wrong", "--input", "odd width", **plugin)
    assert "odd width 67" in again.stdout
    assert "1x4096" not in again.stdout


def test_one_that_raises_is_a_row_and_the_others_are_verified_too(plugin: dict[str, str]) -> None:
    done = fl("verify", "--op", "silu_and_mul", "--dtype", "float32", "--quick", **plugin)
    assert done.returncode == 1
    assert "its 'supports' raised ValueError: broken" in done.stdout
    assert "default.absent cannot run here: not available on this machine" in done.stdout
    assert "default.shy float32 declines 1x4096, 32x2048, " in done.stdout
    assert ": never\n" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("silu_and_mul")]
    assert {row[1] for row in rows if "right" in row} == {"reference.torch", "reference.invariant"}


def test_nothing_verified_is_not_green(plugin: dict[str, str]) -> None:
    for impl_id, text in (("default.shy", "nothing was verified"), ("default.absent", "cannot run here")):
        done = fl("verify", "--impl", impl_id, "--dtype", "float32", "--quick", **plugin)
        assert done.returncode == 2
        assert text in done.stderr


def test_the_time_is_said_before_the_first_row_and_each_row_when_it_is_known(plugin: dict[str, str]) -> None:
    done = fl("verify", "--op", "silu_and_mul", "--impl", "reference.torch", "--quick", **plugin)
    lines = done.stdout.splitlines()
    assert lines[1].startswith("3 rows, about ")
    assert [line.split()[2] for line in lines if line.startswith("silu_and_mul")] == ["bfloat16", "float16", "float32"]
    assert "verifying silu_and_mul reference.torch float16" in done.stderr.splitlines()


def test_what_was_found_before_an_interrupt_is_kept(plugin: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    chosen = ["--op", "silu_and_mul", "--impl", "reference.torch", "--impl", "default.wrong", "--dtype", "float32"]
    command = [sys.executable, "-c", "from fl_dispatch.cli import main; main()", "verify", *chosen, "--out", str(file)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **plugin, "SLOW": "60"})
    partial = tmp_path / "found.json.partial"
    end = time.time() + 60
    while not partial.exists() and time.time() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    text, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"interrupted after 1 rows, which are in {partial}" in text
    written = json.loads(partial.read_text())
    assert [row["impl_id"] for row in written["results"]] == ["reference.torch"]
    assert written["complete"] is False
    assert not file.exists()


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("nosuch", "PyTorch knows no device 'nosuch'; device types are cpu, cuda, gcu, mlu, musa, npu, xpu"),
        ("npu", "device 'ascend': PyTorch knows no device type 'npu'; is the package that brings it ('torch_npu')"),
        ("meta", "device 'meta': its tensors hold no data"),
    ],
)
def test_a_device_that_cannot_be_had_is_one_sentence(device: str, said: str) -> None:
    for command in ("verify", "bench"):
        done = fl(command, "--device", device)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {said}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["SiluAndMul", "swiglu", "silu_mul", "silu-and-mul"])
def test_an_operator_written_otherwise_gets_a_suggestion_everywhere(name: str) -> None:
    for command in (["verify", "--op", name], ["bench", "--op", name], ["explain", name]):
        done = fl(*command)
        assert done.returncode == 2
        assert "did you mean 'silu_and_mul'" in done.stderr
    with pytest.raises(DispatchError, match="did you mean 'silu_and_mul'"):
        call_op(name, torch.ones(2, 4))


TERMS = 8192


def _long_products() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, TERMS, generator=generator) for rows in (8, 64))
    return [Sample("long", (x, weight * TERMS**-0.5, None))]


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A right product, whose sums are rounded at every term."""
    y = x.new_zeros(len(x), len(weight))
    for column in range(x.shape[-1]):
        y.addcmul_(x[:, column : column + 1], weight[:, column])
    return y


def test_a_long_sum_may_have_the_rounding_of_a_long_sum() -> None:
    found = check(one_by_one, "linear", samples=_long_products())
    assert found.verdict == "right"
    assert found.worst.error > found.tolerance.atol  # a short one may not


@pytest.mark.parametrize("terms", [FEW_TERMS, 2048, 16_384])
def test_the_bound_of_a_sum_is_ten_standard_deviations_of_one_that_is_rounded_at_every_term(terms: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, terms, generator=generator) for rows in (64, 512))
    weight = weight * terms**-0.5
    exact, tolerance = x.double() @ weight.double().t(), OPERATORS["linear"].tolerance(torch.float32, (x, weight, None))
    error, share = errors(one_by_one(x, weight), exact, tolerance)
    assert 8 < tolerance.atol / float(error.square().mean().sqrt()) < 12
    assert float(share.max()) < 1


def test_a_long_sum_that_loses_a_term_is_wrong() -> None:
    def loses_one(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return one_by_one(x[:, 1:], weight[:, 1:])

    assert check(loses_one, "linear", samples=_long_products()).verdict == "wrong"


def test_a_long_sum_in_a_half_type_is_wrong() -> None:
    def half(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return (x.bfloat16() @ weight.bfloat16().t()).float()

    assert check(half, "linear", samples=_long_products()).verdict == "wrong"


@pytest.mark.parametrize(("kind", "narrow"), [(torch.int8, False), (torch.float8_e4m3fn, True)])
@pytest.mark.parametrize("result", [torch.float16, torch.float32])
def test_only_sums_of_fp8_in_half_types_may_be_as_far_off_as_a_chip_that_sums_them_with_few_bits(
    kind: torch.dtype, narrow: bool, result: torch.dtype
) -> None:
    operator, ones = OPERATORS["scaled_linear"], torch.ones(1, 1)
    short, long = (
        operator.tolerance(
            result, (torch.zeros(1, n).to(kind), ones, torch.zeros(1, n).to(kind), ones, None, "", 0)
        ).atol
        for n in (32, 4096)
    )
    args = (torch.zeros(1, 64).to(kind), ones, torch.zeros(1, 64).to(kind), ones, None, "", 0)
    assert (operator.most_mean_error(args) > operator.mean_error) is narrow
    assert (long - short > 2.0**-14 * 100) is (narrow and result is torch.float16)
