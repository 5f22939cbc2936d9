"""Never a wrong answer; the input may be guilty; a dead device stays dead."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from builders import failing, impl, manager_of
from fl_dispatch import (
    NotSupported,
    OpManager,
    RankDivergenceError,
    SelectionPolicy,
    set_global_policy,
    with_strict_mode,
)
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.devices import CPU
from fl_dispatch.knowledge.error_kinds import is_dead_device, is_out_of_memory
from fl_dispatch.ops import OPERATORS, Access, Sample

pytestmark = pytest.mark.usefixtures("results_are_names")

Tensor = torch.Tensor


def ok(x: Tensor) -> str:
    return "ok"


def two(first: Any, second: Any = ok, op: str = "silu_and_mul") -> OpManager:
    return manager_of(impl("default.first", first, op=op), impl("reference.second", second, op=op))


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*(shape or (2, 4)), dtype=dtype)


def test_a_failure_falls_back_and_bans_for_that_kind_of_arguments() -> None:
    calls: list[torch.dtype] = []

    def half_only(x: Tensor) -> str:
        calls.append(x.dtype)
        if x.dtype == torch.float32:
            raise RuntimeError("no float32")
        return "first"

    manager = two(half_only)
    for _ in range(3):
        assert manager.call("silu_and_mul", x()) == "ok"
        assert manager.call("silu_and_mul", x(dtype=torch.float16)) == "first"
    assert calls.count(torch.float32) == 1
    assert manager.get_failed_impls() == {"silu_and_mul": {"default.first"}}
    assert "no float32" in str(manager.explain("silu_and_mul", x()))


def test_resolve_call_and_explain_agree_before_and_after_a_ban() -> None:
    manager = two(failing(RuntimeError("boom")))
    assert manager.get_selected_impl_id("silu_and_mul", x()) == "default.first"
    manager.call("silu_and_mul", x())
    for arguments, expected in ((x(), "reference.second"), (x(dtype=torch.float16), "default.first")):
        assert manager.get_selected_impl_id("silu_and_mul", arguments) == expected
        assert manager.explain("silu_and_mul", arguments).chosen.impl_id == expected


def test_explain_without_arguments_tells_a_ban_for_one_kind() -> None:
    manager = two(failing(RuntimeError("boom")))
    assert "banned" not in str(manager.explain("silu_and_mul"))
    manager.call("silu_and_mul", x())
    first, second = manager.explain("silu_and_mul").considered
    assert first.status == "chosen"
    assert "banned for float32" in first.reason
    assert "boom" in first.reason
    assert "banned" not in second.reason
    assert "banned" not in str(manager.explain("silu_and_mul", scope="layers.3"))
    manager.clear_failed_impls()
    assert "banned" not in str(manager.explain("silu_and_mul"))


@pytest.mark.parametrize(
    "change", [lambda t: t.half(), lambda t: t[0], lambda t: t.t().contiguous().t()], ids=["dtype", "rank", "layout"]
)
def test_a_ban_leaves_other_kinds_alone(change: Any) -> None:
    manager = two(failing(RuntimeError("boom")))
    manager.call("silu_and_mul", x(4, 4))
    assert manager.get_selected_impl_id("silu_and_mul", x(4, 4)) == "reference.second"
    assert manager.get_selected_impl_id("silu_and_mul", change(x(4, 4))) == "default.first"


def test_a_ban_in_one_scope_leaves_other_scopes_alone() -> None:
    broken = True

    def first(x: Tensor) -> str:
        if broken:
            raise RuntimeError("boom")
        return "first"

    manager = two(first)
    three, four = manager.bind("silu_and_mul", "layers.3"), manager.bind("silu_and_mul", "layers.4")
    assert three(x()) == "ok"
    broken = False
    assert three(x()) == "ok"
    assert four(x()) == "first"


def test_three_kinds_ban_as_a_whole() -> None:
    manager = two(failing(RuntimeError("boom")))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        manager.call("silu_and_mul", x(dtype=dtype))
    decision = manager.explain("silu_and_mul")
    assert decision.chosen.impl_id == "reference.second"
    assert "failed for 3 kinds" in str(decision)


@pytest.mark.parametrize("lift", ["clear", "clear_op", "policy", "epoch"])
def test_a_ban_is_lifted_by_clearing_and_by_a_policy_change(lift: str) -> None:
    manager = two(failing(RuntimeError("boom")))
    manager.call("silu_and_mul", x())
    manager.clear_failed_impls("another_op")
    assert manager.get_failed_impls("silu_and_mul")
    match lift:
        case "clear":
            manager.clear_failed_impls()
        case "clear_op":
            manager.clear_failed_impls("silu_and_mul")
        case "policy":
            set_global_policy(SelectionPolicy(deny_vendors=frozenset({"z"})))
        case "epoch":
            manager.ask_again()
    assert manager.get_failed_impls() == {}
    assert manager.get_selected_impl_id("silu_and_mul", x()) == "default.first"


def test_when_every_candidate_fails_nobody_is_banned_and_the_first_error_is_raised() -> None:
    manager = two(failing(ValueError("first")), failing(KeyError("second")))
    for _ in range(2):
        with pytest.raises(ValueError, match="first") as caught:
            manager.call("silu_and_mul", x())
        assert any("reference.second" in note and "second" in note for note in caught.value.__notes__)
    assert manager.get_failed_impls() == {}


def test_a_callers_type_error_is_raised_and_good_calls_go_on() -> None:
    manager = two(ok)
    for _ in range(2):
        with pytest.raises(TypeError):
            manager.call("silu_and_mul")
        with pytest.raises(TypeError):
            manager.call("silu_and_mul", x(), "one too many")
        assert manager.call("silu_and_mul", x()) == "ok"
    assert manager.get_failed_impls() == {}


def test_strict_raises_any_error_unchanged() -> None:
    for error in (RuntimeError("boom"), NotImplementedError("not here"), NotSupported("nor here")):
        manager = two(failing(error))
        with with_strict_mode():
            for _ in range(2):
                with pytest.raises(type(error)) as caught:
                    manager.call("silu_and_mul", x())
                assert caught.value is error
        assert manager.get_failed_impls() == {}


def test_strict_still_selects_by_availability_and_supports() -> None:
    manager = manager_of(
        impl("default.gone", failing(RuntimeError()), op="silu_and_mul", available=lambda: False),
        impl("vendor.narrow", failing(RuntimeError()), op="silu_and_mul", supports=lambda x: "no"),
        impl("reference.torch", ok, op="silu_and_mul"),
    )
    with with_strict_mode():
        assert manager.call("silu_and_mul", x()) == "ok"


@pytest.mark.parametrize("error", [NotImplementedError("not for these"), NotSupported("not for these")])
def test_declining_is_no_failure(error: Exception) -> None:
    manager = two(failing(error))
    for _ in range(2):
        assert manager.call("silu_and_mul", x()) == "ok"
    assert manager.get_failed_impls() == {}


def test_out_of_memory_is_the_callers_and_bans_nobody() -> None:
    answers = iter([torch.OutOfMemoryError("CUDA out of memory"), None])

    def once(x: Tensor) -> str:
        error = next(answers)
        if error:
            raise error
        return "first"

    manager = two(once)
    with pytest.raises(torch.OutOfMemoryError):
        manager.call("silu_and_mul", x())
    assert manager.call("silu_and_mul", x()) == "first"


def test_tritons_out_of_resources_is_an_ordinary_failure() -> None:
    class OutOfResources(Exception): ...

    manager = two(failing(OutOfResources("out of resource: shared memory")))
    assert manager.call("silu_and_mul", x()) == "ok"
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))


def test_after_a_dead_device_nothing_is_retried() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert is_dead_device(error)
    manager = two(failing(error), failing(AssertionError("retried")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        manager.call("silu_and_mul", x())


def test_in_lockstep_a_fallback_aborts_the_step() -> None:
    manager = two(failing(RuntimeError("boom")))
    manager.lockstep = True
    with pytest.raises(RankDivergenceError, match=r"default.first.*boom") as caught:
        manager.call("silu_and_mul", x())
    assert "on all ranks: VLLM_FL_PER_OP='silu_and_mul=impl:reference.second'" in str(caught.value)


OVERWRITING = ["rms_norm", "gemma_rms_norm", "rotary_embedding"]


def arguments(op: str) -> tuple[Any, ...]:
    if op == "rotary_embedding":
        half = torch.ones(4, 2)
        return torch.ones(1, 2, 4), torch.ones(1, 2, 4), half, half, torch.zeros(1, dtype=torch.long)
    return torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 1e-6


def spoil(arguments: tuple[Any, ...]) -> None:
    arguments[0].fill_(-1)
    arguments[1].fill_(-1)


def overwriter(op: str, first: Any) -> OpManager:
    def second(*args: Any) -> Any:
        return args[0].clone(), args[1].clone()

    return manager_of(
        impl("default.first", first, op=op, signature="unchecked"),
        impl("reference.second", second, op=op, signature="unchecked"),
    )


@pytest.mark.parametrize("op", OVERWRITING)
@pytest.mark.parametrize("error", [RuntimeError("boom"), NotImplementedError("declined too late")])
def test_an_unproven_implementation_that_writes_and_raises_leaves_the_original_values(
    op: str, error: Exception
) -> None:
    def writes_then_raises(*args: Any) -> Any:
        spoil(args)
        raise error

    manager = overwriter(op, writes_then_raises)
    given = arguments(op)
    first, second = manager.call(op, *given)
    assert first.eq(1).all()
    assert second.eq(1).all()
    assert given[0].eq(1).all()


@pytest.mark.parametrize("op", OVERWRITING)
@pytest.mark.parametrize("error", [RuntimeError("boom"), NotImplementedError("declined too late")])
def test_a_proven_implementation_that_may_have_written_raises_once_and_is_watched_from_then_on(
    op: str, error: Exception
) -> None:
    broken = False

    def first(*args: Any) -> Any:
        if broken:
            spoil(args)
            raise error
        return args[0], args[1]

    manager = overwriter(op, first)
    bound = manager.bind(op)
    bound(*arguments(op))
    broken = True
    with pytest.raises(type(error)) as caught:
        bound(*arguments(op))
    assert any("may have overwritten" in note for note in caught.value.__notes__)
    assert manager.get_failed_impls() == {}
    assert bound(*arguments(op))[0].eq(1).all(), "from now on a copy is kept"


@pytest.mark.parametrize("op", OVERWRITING)
def test_not_supported_promises_that_nothing_was_written(op: str) -> None:
    answers = iter([None, NotSupported("odd size"), None])

    def first(*args: Any) -> Any:
        error = next(answers)
        if error:
            raise error
        return "first"

    manager = overwriter(op, first)
    assert manager.call(op, *arguments(op)) == "first"
    assert manager.call(op, *arguments(op))[0].eq(1).all()
    assert manager.call(op, *arguments(op)) == "first"


def test_success_without_a_residual_does_not_prove_the_overwriting_path() -> None:
    def first(x: Tensor, residual: Any, weight: Any, epsilon: float) -> Any:
        if residual is None:
            return "plain"
        residual.fill_(-1)
        raise RuntimeError("boom")

    manager = overwriter("rms_norm", first)
    for _ in range(3):
        assert manager.call("rms_norm", torch.ones(1, 4)) == "plain"
    assert manager.call("rms_norm", *arguments("rms_norm"))[1].eq(1).all()


def test_a_state_that_cannot_be_copied_is_never_retried() -> None:
    def breaks(key: Any, value: Any, key_cache: Tensor, value_cache: Any, slot_mapping: Any) -> None:
        key_cache.fill_(-1)
        raise RuntimeError("half-way")

    manager = manager_of(
        impl("default.first", breaks, op="kv_cache_write"),
        impl("reference.second", lambda key, value, key_cache, value_cache, slot_mapping: None, op="kv_cache_write"),
    )
    cache = torch.ones(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match="half-way"):
        manager.call("kv_cache_write", cache, cache, cache.clone(), cache.clone(), torch.zeros(1, dtype=torch.long))


def test_a_pure_output_may_be_retried() -> None:
    def breaks(*args: Any) -> Any:
        args[9].fill_(float("nan"))
        raise RuntimeError("half-way")

    def second(*args: Any) -> Any:
        return args[9].zero_()

    op = "paged_attention"
    manager = manager_of(
        impl("default.first", breaks, op=op, signature="unchecked"),
        impl("reference.second", second, op=op, signature="unchecked"),
    )
    t = torch.ones(1, 1, 1)
    assert manager.call(op, t, t, t, t, t, t, 1, 1, 1.0, torch.ones(1, 1, 1)).eq(0).all()


def test_the_log_says_what_failed_and_what_took_over(caplog: pytest.LogCaptureFixture) -> None:
    manager = two(failing(RuntimeError("boom")))
    with caplog.at_level(logging.INFO, logger="fl_dispatch"):
        for _ in range(3):
            manager.call("silu_and_mul", x())
    assert [(record.levelname, record.message.partition(":")[0]) for record in caplog.records] == [
        ("WARNING", "Implementation 'default.first' failed for op 'silu_and_mul'"),
        ("INFO", "Op 'silu_and_mul' using 'reference.second' (kind=reference, vendor=None)"),
        ("INFO", "Op 'silu_and_mul' fallback to 'reference.second' (kind=reference, vendor=None)"),
    ]


def test_an_operator_inside_an_operator_keeps_its_own_error() -> None:
    inner = two(failing(ValueError("inner")), failing(ValueError("inner too")))
    outer = manager_of(impl("default.only", lambda x: inner.call("silu_and_mul", x), op="demo"))
    with pytest.raises(ValueError, match="inner"):
        outer.call("demo", x())


def test_an_undeclared_operator_is_assumed_to_overwrite_any_tensor() -> None:
    broken = True

    def writes(x: Tensor) -> Tensor:
        x.add_(1)
        if broken:
            raise RuntimeError("boom")
        return x

    manager = manager_of(impl("default.a", writes), impl("reference.b", lambda x: x * 2))
    assert manager.call("demo", torch.ones(2)).eq(2).all()
    manager.clear_failed_impls()
    broken = False
    manager.call("demo", torch.ones(2))
    broken = True
    with pytest.raises(RuntimeError, match="boom"):
        manager.call("demo", torch.ones(2))


def test_an_output_that_shares_memory_with_an_input_is_restored() -> None:
    def breaks(*args: Any) -> Any:
        args[9].fill_(7)
        raise RuntimeError("half-way")

    op = "paged_attention"
    manager = manager_of(
        impl("default.first", breaks, op=op, signature="unchecked"),
        impl("reference.second", lambda *args: args[0] * 2, op=op, signature="unchecked"),
    )
    query, t = torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    assert manager.call(op, query, t, t, t, t, t, 1, 1, 1.0, query).eq(2).all()


def test_success_out_of_place_does_not_prove_rotation_in_place() -> None:
    def first(
        query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, rotary_interleaved: Any, inplace: Any
    ) -> Any:
        if inplace:
            query.fill_(99)
            raise RuntimeError("boom")
        return query, key

    manager = overwriter("rotary_embedding", first)
    query, key, *rest = arguments("rotary_embedding")
    for _ in range(3):
        manager.call("rotary_embedding", query, key, *rest, False, False)
    assert manager.call("rotary_embedding", query, key, *rest, False, True)[0].eq(1).all()


def test_arguments_that_cannot_be_written_do_not_hide_the_failure() -> None:
    manager = overwriter("rms_norm", failing_norm)
    first, _ = manager.call("rms_norm", torch.ones(2, 4), torch.ones(1, 4).expand(2, 4), None, 1e-6)
    assert first.eq(1).all()


def failing_norm(x: Tensor, residual: Any, weight: Any, epsilon: float) -> Any:
    raise RuntimeError("kernel says no")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class SilentError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [FrozenError(1), SilentError()])
def test_odd_exceptions_are_raised_as_they_are_and_fall_back_like_others(error: Exception) -> None:
    assert two(failing(error)).call("silu_and_mul", x()) == "ok"
    with pytest.raises(type(error)) as caught:
        two(failing(error), failing(error)).call("silu_and_mul", x())
    assert caught.value is error


def test_notes_are_told_once() -> None:
    error = ValueError("first")
    manager = two(failing(error), failing(KeyError("second")))
    for _ in range(5):
        with pytest.raises(ValueError, match="first"):
            manager.call("silu_and_mul", x())
    assert len(error.__notes__) == 1


def test_out_of_memory_and_a_dead_device_are_seen_inside_groups_and_causes() -> None:
    inner = torch.OutOfMemoryError("CUDA out of memory")
    outer = RuntimeError("kernel failed")
    outer.__cause__ = inner
    assert is_out_of_memory(outer)
    assert is_out_of_memory(ExceptionGroup("two", [ValueError(), inner]))
    assert is_dead_device(RuntimeError("CUDA error: the launch timed out and was terminated"))
    assert not is_out_of_memory(RuntimeError("something else"))


def test_a_failure_names_who_ran_even_if_the_policy_changed_meanwhile() -> None:
    calls: list[str] = []

    def first(x: Tensor) -> str:
        calls.append("first")
        if len(calls) == 2:
            set_global_policy(SelectionPolicy(prefer="reference"))
        if len(calls) > 1:
            raise RuntimeError("boom")
        return "first"

    manager = manager_of(
        impl("vendor.a", first, op="silu_and_mul", supports=lambda x: True),
        impl("reference.torch", ok, op="silu_and_mul"),
    )
    manager.call("silu_and_mul", x())
    assert manager.call("silu_and_mul", x()) == "ok"
    assert calls == ["first", "first"]


@pytest.mark.parametrize("outcome", ["raises", "falls back"])
def test_an_exception_keeps_no_tensor_alive(outcome: str) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def first(x: Tensor) -> Any:
        scratch = torch.empty(1000)
        kept.append(weakref.ref(scratch))
        raise torch.OutOfMemoryError("CUDA out of memory") if outcome == "raises" else RuntimeError("boom")

    manager = two(first)
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(torch.OutOfMemoryError):
                manager.call("silu_and_mul", x())
        assert [reference() for reference in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_an_entry_with_a_ban_still_runs_other_kinds_at_once() -> None:
    def half_only(x: Tensor) -> str:
        if x.dtype == torch.float32:
            raise RuntimeError("no float32")
        return "first"

    manager = two(half_only)
    manager.call("silu_and_mul", x(dtype=torch.float16))
    manager.call("silu_and_mul", x())
    assert manager.table_keeper.root.entries["silu_and_mul"].__name__ == "kind_checked"
    assert manager.call("silu_and_mul", x(dtype=torch.float16)) == "first"
    assert manager.call("silu_and_mul", x=x()) == "ok"


def test_a_strict_context_skips_a_predicate_that_raises_before_and_after_proof() -> None:
    broken = False

    def supports(x: Tensor) -> bool:
        if broken:
            raise ZeroDivisionError
        return True

    manager = manager_of(
        impl("default.a", lambda x: "first", op="silu_and_mul", supports=supports),
        impl("reference.b", ok, op="silu_and_mul"),
    )
    with with_strict_mode():
        assert manager.call("silu_and_mul", x()) == "first"
        broken = True
        assert manager.call("silu_and_mul", x()) == "ok"


@pytest.mark.parametrize("wrap", [lambda t: [t], lambda t: (t, 1), lambda t: {"x": t}], ids=["list", "tuple", "dict"])
def test_tensors_inside_a_list_are_restored_too(wrap: Any) -> None:
    def inside(value: Any) -> Tensor:
        return value["x"] if isinstance(value, dict) else value[0]

    def breaks(value: Any) -> Any:
        inside(value).fill_(-1)
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda value: inside(value) * 2))
    assert manager.call("demo", wrap(torch.ones(2))).eq(2).all()


def test_a_ban_of_an_undeclared_operator_called_by_keyword_is_for_that_dtype() -> None:
    def half_only(*, x: Tensor) -> str:
        if x.dtype == torch.float32:
            raise RuntimeError("no float32")
        return "first"

    manager = manager_of(impl("default.a", half_only), impl("reference.b", lambda *, x: "ok"))
    assert manager.call("demo", x=x()) == "ok"
    assert manager.call("demo", x=x(dtype=torch.float16)) == "first"


def drawn(name: str) -> Iterator[Sample]:
    """An operator's samples, the same each time."""
    samples = OPERATORS[name].samples
    return samples(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(1)) if samples else iter(())


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for tensor in result if tensor is not None]


WRITING = [name for name, operator in OPERATORS.items() if operator.writes and not operator.selection]
STATEFUL = [name for name in WRITING if Access.STATE in {write.access for write in OPERATORS[name].writes.values()}]


@pytest.mark.parametrize("name", [name for name in WRITING if name not in STATEFUL])
def test_whatever_may_be_overwritten_is_right_after_a_fallback(name: str) -> None:
    """The numbers equal those of the reference alone, for every operator and every sample that writes."""
    operator, reference = OPERATORS[name], getattr(ReferenceBackend(), name)

    def spoils(*args: Any) -> Any:
        for _, tensor in operator.written(operator.bind(args, {})).values():
            tensor.fill_(77)
        raise RuntimeError("half-way")

    writing = 0
    for sample, again in zip(drawn(name), drawn(name), strict=True):
        args = operator.bind(again.args, {})
        for access, tensor in operator.written(args).values():
            writing += 1
            if access is Access.OUTPUT:  # rows of padding are nobody's: they may hold what the failed one left
                tensor.fill_(77)
        manager = manager_of(
            impl("default.a", spoils, op=name, signature="unchecked"), impl("reference.b", reference, op=name)
        )
        for got, wanted in zip(
            flat(manager.call(name, *sample.args)), flat(reference(*operator.operands(args))), strict=True
        ):
            assert torch.equal(got, wanted), sample.label
    assert writing > 0


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_written_state_is_never_retried_for_any_operator(name: str, proven: bool) -> None:
    sample = next(drawn(name))
    broken = not proven

    def breaks(*args: Any) -> Any:
        if broken:
            raise RuntimeError("half-way")
        fake = OPERATORS[name].fake
        assert fake is not None
        return fake(*args)

    def retried(*args: Any) -> Any:
        raise AssertionError("retried")

    manager = manager_of(
        impl("default.a", breaks, op=name, signature="unchecked"),
        impl("reference.b", retried, op=name, signature="unchecked"),
    )
    if proven:
        manager.call(name, *sample.args)
        broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half-way"):
            manager.call(name, *sample.args)
    assert manager.get_failed_impls() == {}


def test_inside_a_graph_capture_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = False

    def first(x: Tensor) -> str:
        if broken:
            raise RuntimeError("boom")
        return "first"

    unproven, proven = two(failing(RuntimeError("boom"))), two(first)
    proven.call("silu_and_mul", x())
    broken = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for manager in (unproven, proven):
        with pytest.raises(RuntimeError, match="boom"):
            manager.call("silu_and_mul", x())
        assert manager.get_failed_impls() == {}


def test_inside_a_capture_of_a_device_that_is_not_cuda_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = two(failing(RuntimeError("boom")))
    chip = dataclasses.replace(CPU, is_capturing=lambda: True)
    monkeypatch.setattr("fl_dispatch.knowledge.error_kinds.detect_device", lambda: chip)
    with pytest.raises(RuntimeError, match="boom"):
        manager.call("silu_and_mul", x())
    assert manager.get_failed_impls() == {}


def test_a_failure_after_start_is_told_once_with_its_cause_and_counted() -> None:
    manager = two(failing(RuntimeError("boom")))
    manager.call("silu_and_mul", x())
    assert "default.first: skipped, banned for float32, rank 2, contiguous, cpu: RuntimeError: boom (1 times)" in str(
        manager.explain("silu_and_mul", x())
    )


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("proven", [False, True])
def test_one_transient_out_of_memory_changes_nothing(proven: bool, error: Exception) -> None:
    broken = False

    def first(x: Tensor) -> str:
        if broken:
            raise error
        return "first"

    manager = two(first)
    if proven:
        manager.call("silu_and_mul", x())
    broken = True
    with pytest.raises(type(error)) as caught:
        manager.call("silu_and_mul", x())
    assert caught.value is error
    broken = False
    assert manager.call("silu_and_mul", x()) == "first"
    assert manager.get_failed_impls() == {}


def test_a_dead_device_is_not_retried_by_a_proven_implementation_either() -> None:
    broken = False

    def first(x: Tensor) -> str:
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return "first"

    manager = two(first, failing(AssertionError("retried")))
    manager.call("silu_and_mul", x())
    broken = True
    with pytest.raises(RuntimeError, match="device-side assert"):
        manager.call("silu_and_mul", x())
    assert manager.get_failed_impls() == {}


def test_there_is_no_silent_expiry_of_a_ban() -> None:
    calls: list[int] = []

    def first(x: Tensor) -> str:
        calls.append(1)
        raise RuntimeError("boom")

    manager = two(first)
    for _ in range(500):
        assert manager.call("silu_and_mul", x()) == "ok"
    assert len(calls) == 1


def test_a_callers_type_error_is_no_failure_of_a_bound_operator() -> None:
    manager = two(ok)
    bound = manager.bind("silu_and_mul")
    for _ in range(2):
        with pytest.raises(TypeError):
            bound()
        with pytest.raises(TypeError):
            bound(x(), nothing_of_this_name=1)
        assert bound(x()) == "ok"
    assert manager.get_failed_impls() == {}


def test_a_long_text_of_an_error_is_cut_in_the_log_and_in_the_ban(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(x: Any) -> Any:
        raise RuntimeError("begins" + 3_000_000 * "x" + "ends")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda x: "b"))
    assert manager.call("demo", torch.ones(2)) == "b"
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    (cause,) = (failure.cause for kinds in manager.state.failures.failures().values() for failure in kinds.values())
    for text in (*lines, cause):
        assert len(text) < 2_500
        assert re.search(r"begins.*3,000,024 characters in all.*ends", text)
    assert lines


@pytest.mark.parametrize("name", [name for name in WRITING if name not in STATEFUL])
def test_an_argument_that_is_declared_an_output_is_never_read(name: str) -> None:
    """By what the reference computes, because a fallback does not restore it: an old value must make no difference."""
    operator, reference = OPERATORS[name], getattr(ReferenceBackend(), name)
    results: list[list[list[Tensor]]] = []
    for old in (77, 78):
        results.append([])
        bound = (operator.bind(sample.args, {}) for sample in drawn(name))
        for args in itertools.islice((args for args in bound if operator.written(args)), 3):
            for access, tensor in operator.written(args).values():
                if access is Access.OUTPUT:
                    tensor.fill_(old)
            results[-1].append(flat(reference(*operator.operands(args))))
    for first, second in zip(*results, strict=True):
        for one, other in zip(first, second, strict=True):
            differs = ~one.isclose(other, equal_nan=True, rtol=0, atol=0)
            assert one[differs].eq(77).all(), "it was read"
            assert other[differs].eq(78).all(), "it was read"


ACCUMULATED = {
    "lora_shrink": {"out"},
    "lora_expand": {"y"},
    "rms_norm": {"x", "residual"},
    "gemma_rms_norm": {"x", "residual"},
    "rms_norm_quantize": {"residual"},
    "rotary_embedding": {"query", "key"},
}
"""Operators → arguments that they read and overwrite, by the papers that define them, and not by the declarations."""


def test_arguments_that_are_read_and_overwritten_are_declared_so() -> None:
    declared = {
        name: {argument for argument, write in OPERATORS[name].writes.items() if write.access is Access.UPDATE}
        for name in WRITING
    }
    assert {name: arguments for name, arguments in declared.items() if arguments} == ACCUMULATED
