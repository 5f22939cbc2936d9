"""Shadow mode compares a share of live calls, never changes an answer, costs what it may, and says what it found."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    OpManager,
    OpRegistry,
    SelectionPolicy,
    bind_op,
    get_default_manager,
    policy_context,
    set_global_policy,
    with_strict_mode,
)
from fl_dispatch.backends.reference.impl import attention, normalization
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.devices import detect_device
from fl_dispatch.locking import writers
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import reset_settings
from fl_dispatch.shadow.findings import Finding
from fl_dispatch.shadow.sampling import SAVED_SECONDS, Sampling, SamplingOptions
from fl_dispatch.types import OpImpl

Tensor = torch.Tensor
EVERYTHING = SamplingOptions(share=1.0, operators=None, second="reference", ban=False, budget=1.0)
BANNING = SamplingOptions(share=1.0, operators=None, second="reference", ban=True, budget=1.0)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def wrong_over_two(x: Tensor) -> Tensor:
    """Wrong for more than two rows."""
    return silu_and_mul(x) + (0.01 if x.shape[0] > 2 else 0.0)


def watching(
    *impls: OpImpl, chosen: SamplingOptions = EVERYTHING, clock: Callable[[], float] | None = None
) -> OpManager:
    manager = manager_of(*impls)
    manager.shadow.sampling = Sampling(chosen, clock or Clock())
    return manager


def gated(first: Any, chosen: SamplingOptions = EVERYTHING, **options: Any) -> OpManager:
    return watching(
        impl("vendor.mine", first, op="silu_and_mul"),
        impl("reference.torch", silu_and_mul, op="silu_and_mul"),
        chosen=chosen,
        **options,
    )


def findings(manager: OpManager) -> list[Finding]:
    return list(manager.shadow.findings.found())


def proven(manager: OpManager, x: Tensor) -> OpManager:
    """After its first call, which is never drawn."""
    manager.call("silu_and_mul", x)
    return manager


SMALL, LARGE = torch.linspace(-2, 2, 16).reshape(2, 8), torch.linspace(-2, 2, 40).reshape(5, 8)


def test_off_nothing_stands_in_the_table() -> None:
    manager = manager_of(impl("vendor.mine", silu_and_mul, op="silu_and_mul"))
    proven(manager, SMALL)
    assert manager.table_keeper.root.entries["silu_and_mul"] is silu_and_mul


def test_a_drawn_call_does_not_wait_for_who_changes_something() -> None:
    sampling, done = Sampling(SamplingOptions(1.0, None, "reference", False, 1.0)), threading.Event()

    def draw() -> None:
        sampling.affordable()
        sampling.charge(0.0)
        done.set()

    with writers:
        threading.Thread(target=draw, daemon=True).start()
        assert done.wait(10)


@pytest.mark.parametrize("setting", ["VLLM_FL_SHADOW_SHARE", "VLLM_FL_SHADOW_BUDGET"])
def test_a_share_or_a_budget_of_nothing_is_off(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_SHADOW_SHARE", "0.5")
    monkeypatch.setenv(setting, "0")
    reset_settings()
    manager = OpManager(OpRegistry())
    manager.ensure_initialized()
    assert manager.shadow.sampling is None


def test_the_settings_switch_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_SHADOW_SHARE", "0.5")
    monkeypatch.setenv("VLLM_FL_SHADOW_OPERATORS", "rms_norm")
    reset_settings()
    manager = OpManager(OpRegistry())
    manager.ensure_initialized()
    assert manager.shadow.sampling is not None
    assert manager.shadow.sampling.options == SamplingOptions(0.5, frozenset({"rms_norm"}), "reference", False, 0.01)


def test_the_caller_gets_the_first_result_and_the_difference_is_recorded_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = proven(gated(wrong_over_two), SMALL)
    for _ in range(3):
        assert torch.equal(manager.call("silu_and_mul", LARGE), wrong_over_two(LARGE))
        assert torch.equal(manager.call("silu_and_mul", SMALL), silu_and_mul(SMALL))
    (found,) = findings(manager)
    assert (found.op_name, found.impl_id, found.second, found.calls) == (
        "silu_and_mul", "vendor.mine", "reference.torch", 3,
    )  # fmt: skip
    assert found.worst > 100
    assert manager.shadow.findings.compared_calls() == {("silu_and_mul", "vendor.mine"): 6}
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "shadow: 'silu_and_mul' by 'vendor.mine' differs from 'reference.torch': output 0 at [" in told[0]
    assert "float32, rank 2, contiguous, cpu); it goes on, because shadow_action is 'log'" in told[0]
    assert manager.get_failed_impls() == {}


def test_a_kind_is_operator_implementation_dtype_rank_and_layer(caplog: pytest.LogCaptureFixture) -> None:
    manager = proven(gated(lambda x: silu_and_mul(x) + 1), SMALL)
    bound = [manager.bind("silu_and_mul", f"layers.{layer}") for layer in range(2)]
    for _ in range(2):
        for call in bound:
            call(LARGE)
        manager.call("silu_and_mul", LARGE[None])
        manager.call("silu_and_mul", LARGE.half())
    kinds = [(str(found.kind.dtype), found.kind.rank, found.kind.scope, found.calls) for found in findings(manager)]
    assert kinds == [
        ("torch.float32", 2, "layers.0", 2),
        ("torch.float32", 2, "layers.1", 2),
        ("torch.float32", 3, None, 2),
        ("torch.float16", 2, None, 2),
    ]
    assert len(caplog.records) - sum(record.levelno < logging.WARNING for record in caplog.records) == 4


def test_what_differs_only_in_rounding_is_no_finding() -> None:
    def rounds_twice(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.float()).to(x.dtype) * up

    manager = gated(rounds_twice)
    for scale in (1e-3, 1.0, 300.0):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * min(scale, 100)).to(dtype)
            manager.call("silu_and_mul", x)
    assert manager.shadow.findings.compared_calls()["silu_and_mul", "vendor.mine"] == 8
    assert findings(manager) == []


@pytest.mark.parametrize(("value", "found"), [(100.0, 0), (0.1, 1)])
def test_the_absolute_tolerance_grows_with_the_values_of_a_row(value: float, found: int) -> None:
    def off_at_zero(x: Tensor) -> Tensor:
        return silu_and_mul(x) + (x[..., : x.shape[-1] // 2] == 0) * 1e-4

    manager = gated(off_at_zero)
    for _ in range(2):
        manager.call("silu_and_mul", torch.tensor([[0.0, value, value, value, 1.0, 1.0, 1.0, 1.0]]))
    assert manager.shadow.findings.compared_calls() == {("silu_and_mul", "vendor.mine"): 1}
    assert len(findings(manager)) == found


def test_a_number_where_there_is_none_is_a_finding() -> None:
    manager = proven(gated(lambda x: silu_and_mul(x).masked_fill_(torch.tensor(x.shape[0] > 2), torch.nan)), SMALL)
    manager.call("silu_and_mul", LARGE)
    assert findings(manager)[0].as_data()["worst"] is None


def test_overwritten_arguments_are_copied_before() -> None:
    def in_place(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
        if residual is None:
            return normalization.rms_norm(x, None, weight, epsilon)
        y, total = normalization.rms_norm(x, residual, weight, epsilon)
        return x.copy_(y), residual.copy_(total)

    manager = watching(
        impl("vendor.mine", in_place, op="rms_norm"), impl("reference.torch", normalization.rms_norm, op="rms_norm")
    )
    for _ in range(3):
        x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
        expected = normalization.rms_norm(x, residual, weight, 1e-6)
        y, total = manager.call("rms_norm", x, residual, weight, 1e-6)
        assert y is x
        assert torch.equal(y, expected[0])
        assert torch.equal(total, expected[1])
    assert manager.shadow.findings.compared_calls() == {("rms_norm", "vendor.mine"): 2}
    assert findings(manager) == []


def test_a_layer_first_implementation_is_compared_by_what_its_layer_holds() -> None:
    class Norm:
        def __init__(self, weight: Tensor) -> None:
            self.weight, self.variance_epsilon = weight, 1e-5

    def of_layer(obj: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        result = normalization.rms_norm(x, residual, obj.weight, obj.variance_epsilon)
        return result * 2 if x.shape[0] > 2 else result

    manager = watching(
        impl("vendor.mine", of_layer, op="rms_norm"), impl("reference.torch", normalization.rms_norm, op="rms_norm")
    )
    layer = Norm(torch.randn(8))
    for rows in (1, 2, 5):
        manager.call("rms_norm", layer, torch.randn(rows, 8))
        manager.call("rms_norm", torch.randn(rows, 8), None, layer.weight, 1e-5)
    assert [found.calls for found in findings(manager)] == [2]


def _cache_arguments(slots: list[int]) -> tuple[Tensor, ...]:
    key, value = torch.randn(len(slots), 2, 4), torch.randn(len(slots), 2, 4)
    return key, value, torch.zeros(6, 4, 2, 4), torch.zeros(6, 4, 2, 4), torch.tensor(slots)


def test_a_cache_write_is_compared_by_its_slots_and_the_cache_is_written_once() -> None:
    def skips_the_last(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        kept = slot_mapping[:-1] if len(slot_mapping) > 2 else slot_mapping
        attention.kv_cache_write(key, value, key_cache, value_cache, kept)

    manager = watching(
        impl("vendor.mine", skips_the_last, op="kv_cache_write"),
        impl("reference.torch", attention.kv_cache_write, op="kv_cache_write"),
    )
    for slots in ([0, 1], [21, -1], [3, 17, -1, 8]):
        args = _cache_arguments(slots)
        manager.call("kv_cache_write", *args)
        written = {int(index) for index in args[2].flatten(0, 1).abs().sum((1, 2)).nonzero()}
        assert written == {slot for slot in slots[: 3 if len(slots) > 2 else 2] if slot >= 0}
    (found,) = findings(manager)
    assert found.example.startswith(("state 0 at [3, ", "state 1 at [3, "))  # keys, values
    assert manager.shadow.findings.compared_calls() == {("kv_cache_write", "vendor.mine"): 2}


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.samples is not None])
def test_a_reference_never_differs_from_itself(name: str) -> None:
    """Every declared operator can be compared: with copies, small states, rows that nobody writes."""
    reference = next(each for each in get_default_manager_impls(name) if each.impl_id == "reference.torch")
    mine = OpImpl(name, "vendor.mine", impl("vendor.x").kind, reference.fn, vendor="mine", signature="unchecked")
    manager = watching(mine, reference)
    samples = OPERATORS[name].samples
    assert samples is not None
    for sample in samples(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)):
        manager.call(name, *sample.args)
    assert manager.shadow.findings.unfit == {}
    assert manager.shadow.findings.compared_calls()[name, "vendor.mine"] > 1
    assert findings(manager) == []


def get_default_manager_impls(name: str) -> list[OpImpl]:
    manager = get_default_manager()
    manager.ensure_initialized()
    return list(manager.registry.get_implementations(name))


# -- taking a wrong implementation out --------------------------------------------------------------------------------


def test_with_ban_a_wrong_implementation_is_out_and_later_answers_are_right() -> None:
    manager = proven(gated(wrong_over_two, BANNING), SMALL)
    assert torch.equal(manager.call("silu_and_mul", LARGE), wrong_over_two(LARGE))
    assert torch.equal(manager.call("silu_and_mul", LARGE), silu_and_mul(LARGE))
    assert findings(manager)[0].outcome == "it is banned for these arguments"
    assert "WrongResultError: differs from 'reference.torch'" in str(manager.explain("silu_and_mul", LARGE))


def test_a_ban_that_a_policy_change_lifted_comes_back() -> None:
    manager = proven(gated(wrong_over_two, BANNING), SMALL)
    for _ in range(2):
        manager.call("silu_and_mul", LARGE)
        assert torch.equal(manager.call("silu_and_mul", LARGE), silu_and_mul(LARGE))
        manager.clear_failed_impls()


def _frozen(manager: OpManager) -> None:
    manager.freezer.freeze(compiling=False)


def _lockstep(manager: OpManager) -> None:
    manager.lockstep = True


def _other_second(manager: OpManager) -> None:
    other = impl("default.triton", silu_and_mul, op="silu_and_mul")
    manager.registry.register_impl(other)
    manager.shadow.sampling = Sampling(SamplingOptions(1.0, None, "impl:default.triton", True, 1.0), Clock())
    manager.ask_again()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_frozen, "compiled code or a captured graph holds this choice"),
        (_lockstep, "ranks run in step and this one alone must not choose anew"),
        (_other_second, "only the reference says which of the two is wrong"),
    ],
)
def test_where_a_ban_is_not_safe_it_is_refused_and_said(make: Callable[[OpManager], None], reason: str) -> None:
    manager = gated(wrong_over_two, BANNING)
    if make is _other_second:
        set_global_policy(SelectionPolicy(prefer="vendor"))
    proven(manager, SMALL)
    make(manager)
    for _ in range(2):
        assert torch.equal(manager.call("silu_and_mul", LARGE), wrong_over_two(LARGE))
    assert findings(manager)[0].outcome == f"it goes on, because {reason}"
    assert manager.get_failed_impls() == {}
    manager.freezer.thaw()


def test_the_only_implementation_that_the_policy_admits_is_not_banned() -> None:
    manager = gated(wrong_over_two, BANNING)
    set_global_policy(SelectionPolicy(per_op_order=(("silu_and_mul", ("impl:vendor.mine",)),)))
    proven(manager, SMALL)
    assert torch.equal(manager.call("silu_and_mul", LARGE), wrong_over_two(LARGE))
    assert "leaves no other implementation" in findings(manager)[0].outcome


# -- what goes wrong in the second run ---------------------------------------------------------------------------------


def test_a_failure_of_the_second_run_is_told_once_and_the_call_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def no_memory(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    manager = watching(
        impl("vendor.mine", silu_and_mul, op="silu_and_mul"), impl("reference.torch", no_memory, op="silu_and_mul")
    )
    for _ in range(3):
        assert torch.equal(manager.call("silu_and_mul", LARGE), silu_and_mul(LARGE))
    assert "out of memory" in manager.shadow.findings.unfit["silu_and_mul"]
    assert sum("not all compared" in record.getMessage() for record in caplog.records) == 1
    assert manager.get_failed_impls() == {}


def test_an_error_of_the_first_run_goes_its_usual_way() -> None:
    def fails_over_two(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            raise RuntimeError("too many rows")
        return silu_and_mul(x)

    manager = proven(gated(fails_over_two), SMALL)
    assert torch.equal(manager.call("silu_and_mul", LARGE), silu_and_mul(LARGE))
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.mine"}}
    with with_strict_mode():
        assert findings(manager) == []


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = proven(gated(silu_and_mul), SMALL)
    monkeypatch.setattr(type(detect_device()), "captures", lambda self: True)
    manager.call("silu_and_mul", LARGE)
    assert manager.shadow.findings.compared_calls() == {}


# -- how many, and what it costs ---------------------------------------------------------------------------------------


def test_a_share_of_the_calls_is_drawn_alike_on_all_ranks() -> None:
    compared = []
    for _ in range(2):
        chosen = SamplingOptions(0.1, None, "reference", False, 1.0)
        manager = proven(gated(silu_and_mul, chosen), SMALL)
        for _ in range(2000):
            manager.call("silu_and_mul", SMALL)
        compared.append(manager.shadow.findings.compared_calls()["silu_and_mul", "vendor.mine"])
    assert compared[0] == compared[1]
    assert 140 < compared[0] < 260


def test_a_share_next_to_nothing_draws_next_to_nothing() -> None:
    sampling = Sampling(SamplingOptions(1e-12, None, "reference", False, 1.0))
    assert next(sampling.gaps("rms_norm@")) > 10**6


def test_comparing_costs_no_more_than_its_budget_of_the_time() -> None:
    clock = Clock()

    def slow(x: Tensor) -> Tensor:
        clock.now += 1.0
        return silu_and_mul(x)

    manager = watching(
        impl("vendor.mine", silu_and_mul, op="silu_and_mul"),
        impl("reference.torch", slow, op="silu_and_mul"),
        chosen=SamplingOptions(1.0, None, "reference", False, 0.02),
        clock=clock,
    )
    for _ in range(2000):
        clock.now += 0.5
        manager.call("silu_and_mul", SMALL)
    sampling = manager.shadow.sampling
    assert sampling is not None
    assert 18 <= manager.shadow.findings.compared_calls()["silu_and_mul", "vendor.mine"] <= 22
    assert sampling.share_of_time() <= 0.021
    assert sampling.passed_over > 1900


def test_an_idle_hour_saves_no_hour_of_comparing() -> None:
    clock = Clock()
    sampling = Sampling(SamplingOptions(1.0, None, "reference", False, 0.01), clock)
    clock.now += 3600
    assert sampling.affordable()
    sampling.charge(SAVED_SECONDS * 0.01 + 1.0)
    assert not sampling.affordable()


def test_only_the_operators_asked_for_are_watched() -> None:
    chosen = SamplingOptions(1.0, frozenset({"rms_norm"}), "reference", False, 1.0)
    manager = proven(gated(silu_and_mul, chosen), SMALL)
    assert manager.table_keeper.root.entries["silu_and_mul"] is silu_and_mul


def test_the_second_implementation_itself_is_not_watched() -> None:
    manager = watching(impl("reference.torch", silu_and_mul, op="silu_and_mul"))
    proven(manager, SMALL)
    assert manager.table_keeper.root.entries["silu_and_mul"] is silu_and_mul


@pytest.mark.parametrize("opaque", [True, False])
def test_calls_behind_a_view_are_compared_and_what_is_traced_is_traced_as_ever(opaque: bool) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    manager.shadow.sampling = Sampling(EVERYTHING, Clock())
    manager.registry.register_impl(impl("vendor.mine", wrong_over_two, op="silu_and_mul", opaque=opaque))
    with policy_context(SelectionPolicy(per_op_order=(("silu_and_mul", ("impl:vendor.mine", "reference")),))):
        gate = bind_op("silu_and_mul")
        gate(SMALL)
        compiled = torch.compile(lambda x: gate(x) + 1, backend="eager", fullgraph=True)
        assert torch.equal(compiled(LARGE), wrong_over_two(LARGE) + 1)
        assert [found.calls for found in findings(manager)] == ([1] if opaque else [])
        gate(LARGE)
    assert [found.calls for found in findings(manager)] == [2 if opaque else 1]


@pytest.mark.parametrize("share", [5e-324, 1e-320, 1e-308, 1e-300, 1e-9, 1 - 2**-53, 1.0])
def test_any_share_that_is_accepted_draws_calls(share: float) -> None:
    gaps = Sampling(SamplingOptions(share, None, "reference", False, 1.0)).gaps("demo")
    drawn = [next(gaps) for _ in range(20)]
    assert min(drawn) >= 1
    assert (max(drawn) == 1) == (share > 0.9)


WRITING = [name for name, operator in OPERATORS.items() if operator.writes and not operator.selection]


@pytest.mark.parametrize("name", WRITING)
def test_the_second_run_leaves_whatever_the_caller_passed_as_the_first_one_left_it(name: str) -> None:
    operator, reference = OPERATORS[name], getattr(ReferenceBackend(), name)
    ran: list[str] = []

    def spoils(*args: Any) -> Any:
        result = reference(*operator.operands(args))
        for _, tensor in operator.written(operator.bind(args, {})).values():
            tensor.fill_(55)
        ran.append(name)
        return result

    def calls() -> list[tuple[Any, ...]]:
        assert operator.samples is not None
        drawn = operator.samples(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(1))
        bound = (operator.bind(sample.args, {}) for sample in drawn)
        return [*itertools.islice((args for args in bound if operator.written(args)), 3)]

    manager = watching(
        impl("vendor.mine", reference, op=name), impl("reference.torch", spoils, op=name, signature="unchecked")
    )
    manager.call(name, *calls()[0])  # a first call is never drawn
    for args, before in zip(calls(), calls(), strict=True):
        manager.call(name, *args)
        reference(*operator.operands(before))
        for argument, now, alone in zip(operator.parameters, args, before, strict=True):
            if isinstance(now, Tensor):
                assert now.float().allclose(alone.float(), rtol=0, atol=0, equal_nan=True), argument
    assert ran or name in manager.shadow.findings.unfit
