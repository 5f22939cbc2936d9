"""While dispatch is frozen nothing changes what runs, nothing takes over, and the manifest says what that is."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from builders import failing, impl
from fl_dispatch import (
    DispatchFrozenError,
    Manifest,
    NoImplementationError,
    NotSupported,
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    freeze_dispatch,
    get_default_manager,
    get_policy,
    policy_context,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    thaw_dispatch,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)

pytestmark = pytest.mark.usefixtures("results_are_names")

OP = "relu2"


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    thaw_dispatch()


@pytest.fixture
def registered() -> None:
    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x + 1, op=OP), impl("vendor.b", lambda x: x + 2, op=OP)]
    )


def run() -> float:
    return float(call_op(OP, torch.zeros(2)).flatten()[0])


def changes() -> dict[str, Callable[[], Any]]:
    """Every way to ask for another implementation of :data:`OP` than the registered ``default.a``."""

    def enter(context: Any) -> Callable[[], None]:
        def entered() -> None:
            with context():
                raise AssertionError("the context was entered")

        return entered

    def register() -> None:
        get_default_manager().registry.register_impl(impl("default.z", lambda x: x + 3, op=OP, priority=999))

    def clear() -> None:
        get_default_manager().registry.clear()

    return {
        "set_global_policy": lambda: set_global_policy(SelectionPolicy(prefer="vendor")),
        "policy_context": enter(
            functools.partial(policy_context, SelectionPolicy(per_op_order=((OP, ("reference",)),)))
        ),
        "with_preference": enter(functools.partial(with_preference, "reference")),
        "register_impl": register,
        "clear": clear,
    }


@pytest.mark.parametrize("name", changes())
@pytest.mark.usefixtures("registered")
def test_a_change_that_would_make_something_else_run_is_refused_and_changes_nothing(name: str) -> None:
    freeze_dispatch()
    before = [entry.as_data() for entry in explain(OP).considered]
    with pytest.raises(DispatchFrozenError, match=f"{OP}: default.a would become"):
        changes()[name]()
    assert run() == 1
    assert [entry.as_data() for entry in explain(OP).considered] == before


@pytest.mark.parametrize("name", changes())
@pytest.mark.usefixtures("registered")
def test_the_same_change_passes_before_and_after(name: str) -> None:
    freeze_dispatch()
    thaw_dispatch()
    expected: Any = contextlib.nullcontext()
    if name in ("policy_context", "with_preference"):
        expected = pytest.raises(AssertionError, match="entered")
    with expected:
        changes()[name]()


@pytest.mark.usefixtures("registered")
def test_a_change_that_alters_no_choice_passes() -> None:
    frozen = freeze_dispatch()
    set_global_policy(SelectionPolicy(strict=True))
    with with_denied_vendors("b"), with_strict_mode(), with_allowed_vendors("a", "cpu"):
        assert run() == 1
    registry = get_default_manager().registry
    registry.register_impl(impl("default.low", lambda x: x, op=OP, priority=1))
    registry.register_impl(impl("default.new", op="an_operator_of_its_own"))
    assert call_op("an_operator_of_its_own") == "default.new"
    get_default_manager().clear_failed_impls()
    get_default_manager().set_facts(unrelated=1)
    get_default_manager().ask_again()
    reset_global_policy()
    assert run() == 1
    assert freeze_dispatch() is frozen


@pytest.mark.usefixtures("registered")
def test_settings_that_would_change_a_choice_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_dispatch()
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    with pytest.raises(DispatchFrozenError, match="the settings would change"):
        reset_global_policy()
    assert run() == 1
    with pytest.raises(DispatchFrozenError, match="settings|new manager"):
        reset_default_manager()
    thaw_dispatch()
    reset_global_policy()
    assert run() == 2


def test_facts_and_availability_that_would_change_a_choice_are_refused() -> None:
    here = {"available": True}
    manager = get_default_manager()
    manager.registry.register_many(
        [
            impl("default.a", lambda x: x + 1, op=OP, requires={"kv_layout": "A"}, available=lambda: here["available"]),
            impl("vendor.b", lambda x: x + 2, op=OP),
        ]
    )
    freeze_dispatch()
    with pytest.raises(DispatchFrozenError, match="facts"):
        manager.set_facts(kv_layout="B")
    here["available"] = False
    with pytest.raises(DispatchFrozenError, match="anew|again"):
        manager.ask_again()
    assert run() == 1


def test_the_frozen_policy_set_again_does_not_lift_a_frozen_ban() -> None:
    broken = {"now": True}

    def first(x: torch.Tensor) -> torch.Tensor:
        if broken["now"]:
            raise RuntimeError("broken")
        return x + 1

    get_default_manager().registry.register_many(
        [impl("default.a", first, op=OP), impl("vendor.b", lambda x: x + 2, op=OP)]
    )
    assert run() == 2
    broken["now"] = False
    freeze_dispatch()
    with policy_context(get_policy()):
        assert run() == 2
    with pytest.raises(DispatchFrozenError, match="global policy"):
        set_global_policy(get_policy())
    assert run() == 2


@pytest.mark.usefixtures("registered")
def test_what_a_context_was_admitted_with_is_checked_at_later_registrations_too() -> None:
    set_global_policy(SelectionPolicy(per_op_order=((OP, ("impl:default.a",)),)))
    freeze_dispatch()
    with policy_context(SelectionPolicy()):
        assert run() == 1
        with pytest.raises(DispatchFrozenError, match="registration"):
            get_default_manager().registry.register_impl(impl("default.z", lambda x: x + 9, op=OP, priority=999))
        assert run() == 1


@pytest.mark.usefixtures("registered")
def test_a_context_that_is_open_when_dispatch_freezes_runs_what_is_fixed() -> None:
    with with_preference("vendor"):
        assert run() == 2
        freeze_dispatch()
        assert run() == bind_op(OP)(torch.zeros(1)).item() == 1
    assert run() == 1


def test_an_operator_or_layer_that_comes_later_is_fixed_when_it_comes() -> None:
    freeze_dispatch()
    registry = get_default_manager().registry
    registry.register_impl(impl("default.one", lambda: 1, op="late"))
    with pytest.raises(DispatchFrozenError, match="late"):
        registry.register_impl(impl("default.two", lambda: 2, op="late", priority=500))
    assert call_op("late") == 1


@pytest.mark.usefixtures("registered")
def test_what_comes_later_is_checked_for_policies_that_were_admitted_before() -> None:
    freeze_dispatch()
    other = SelectionPolicy(per_op_order=(("late", ("vendor",)),))
    with policy_context(other):
        assert run() == 1
        get_default_manager().registry.register_many([impl("vendor.b", op="late"), impl("reference.c", op="late")])
        assert call_op("late") == "vendor.b"
    get_default_manager().registry.register_many(
        [impl("vendor.b", op="later"), impl("reference.c", op="later", supports=None)]
    )
    with (
        pytest.raises(DispatchFrozenError, match="later"),
        policy_context(SelectionPolicy(per_op_order=(("later", ("reference",)),))),
    ):
        raise AssertionError("the context was entered")


@pytest.mark.usefixtures("registered")
def test_a_forked_child_of_a_frozen_process_registers() -> None:
    freeze_dispatch()
    pid = os.fork()
    if pid == 0:
        get_default_manager().registry.register_impl(impl("default.new", op="brand_new"))
        os._exit(0 if call_op("brand_new") == "default.new" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_layer_bound_while_frozen_follows_its_own_rule() -> None:
    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x + 1, op=OP), impl("vendor.b", lambda x: x + 2, op=OP)]
    )
    set_global_policy(SelectionPolicy(per_op_order=((f"{OP}@model.layers.1.*", ("vendor",)),)))
    freeze_dispatch()
    bound = [bind_op(OP, f"model.layers.{layer}.act") for layer in range(2)]
    assert [layer(torch.zeros(1)).item() for layer in bound] == [1, 2]


def test_a_frozen_failure_is_raised_and_bans_nobody() -> None:
    error = RuntimeError("broken")
    get_default_manager().registry.register_many(
        [impl("default.a", failing(error), op=OP), impl("vendor.b", lambda x: x + 2, op=OP)]
    )
    bound_before = bind_op(OP)
    freeze_dispatch()
    for call in (run, lambda: bound_before(torch.zeros(2)), lambda: bind_op(OP)(torch.zeros(2))):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert caught.value is error
    assert get_default_manager().get_failed_impls() == {}


def test_a_predicate_still_chooses_while_frozen_but_declining_by_an_exception_is_raised() -> None:
    def declines(x: torch.Tensor) -> torch.Tensor:
        raise NotSupported("not these")

    registry = get_default_manager().registry
    registry.register_many(
        [
            impl("default.a", declines, op=OP, supports=lambda x: x.numel() > 2),
            impl("vendor.b", lambda x: x + 2, op=OP),
        ]
    )
    manifest = freeze_dispatch()
    assert manifest.choices[OP] == [{"runs": ["default.a", "vendor.b"]}]
    for call in (run, lambda: bind_op(OP)(torch.zeros(2))[0]):
        assert call() == 2
    for call in (call_op, lambda op, x: bind_op(op)(x)):
        with pytest.raises(NotSupported):
            call(OP, torch.zeros(3))


def test_a_ban_is_part_of_what_is_frozen() -> None:
    broken = {"now": True}

    def first(x: torch.Tensor) -> torch.Tensor:
        if broken["now"]:
            raise RuntimeError("broken")
        return x + 1

    manager = get_default_manager()
    manager.registry.register_many([impl("default.a", first, op=OP), impl("vendor.b", lambda x: x + 2, op=OP)])
    assert run() == 2
    broken["now"] = False
    manifest = freeze_dispatch()
    assert manifest.choices[OP] == [
        {"runs": ["default.a", "vendor.b"], "not for": ["default.a: float32, rank 1, contiguous, cpu"]}
    ]
    with pytest.raises(DispatchFrozenError, match="lifting bans"):
        manager.clear_failed_impls()
    manager.clear_failed_impls("gelu_and_mul")
    assert run() == 2


@pytest.mark.usefixtures("registered")
def test_an_operator_bound_while_frozen_is_the_implementation_itself() -> None:
    chosen = explain(OP).chosen
    assert chosen is not None
    dynamic = bind_op(OP, "model.layers.0")
    freeze_dispatch()
    assert bind_op(OP) is bind_op(OP, "model.layers.0") is chosen.fn
    assert dynamic is not chosen.fn
    thaw_dispatch()
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert dynamic(torch.zeros(1)).item() == 2
    assert bind_op(OP)(torch.zeros(1)).item() == 2


def test_the_only_implementation_is_still_asked_whether_it_takes_the_call() -> None:
    def small(x: torch.Tensor) -> bool:
        return x.numel() < 3

    registry = get_default_manager().registry
    registry.register_impl(impl("vendor.b", lambda x: x + 2, op=OP, supports=small))
    set_global_policy(SelectionPolicy(per_op_order=((OP, ("vendor",)),)))
    freeze_dispatch()
    for call in (bind_op(OP), lambda x: call_op(OP, x)):
        assert call(torch.zeros(2))[0] == 2
        with pytest.raises(NoImplementationError, match="does not support"):
            call(torch.zeros(3))


def test_a_frozen_conditional_choice_stays_conditional() -> None:
    from fl_dispatch.settings import TunedRule

    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x + 1, op=OP), impl("vendor.b", lambda x: x + 2, op=OP)]
    )
    rule = TunedRule(order=("vendor:b",), dtype=None, tokens=(1, 4), phase=None)
    set_global_policy(SelectionPolicy(op_tuned=((OP, (rule,)),)))
    bound = bind_op(OP)
    manifest = freeze_dispatch()
    for call in (bound, bind_op(OP)):
        assert call(torch.zeros(3, 2))[0, 0] == 2
        assert call(torch.zeros(5, 2))[0, 0] == 1
    assert [choice["runs"] for choice in manifest.choices[OP]] == [["vendor.b"], ["default.a"]]
    assert manifest.choices[OP][0]["when"] == {"dtype": None, "tokens": [1, 4], "phase": None}


@pytest.mark.usefixtures("registered")
def test_operators_that_a_host_joins_are_of_the_manifests_hash_and_stay_while_frozen() -> None:
    apart = freeze_dispatch()
    assert get_default_manager().keep_whole([OP]) == set()
    thaw_dispatch()
    assert get_default_manager().keep_whole([OP]) == {OP}
    joined = freeze_dispatch()
    assert joined.hash != apart.hash
    assert joined.differences(apart) == [f"{OP}: called whole here, nothing there"]
    assert Manifest.from_data(joined.as_data()) == joined


@pytest.mark.usefixtures("registered")
def test_the_manifest_names_what_runs_why_and_layers_that_differ() -> None:
    set_global_policy(SelectionPolicy(per_op_order=((f"{OP}@model.layers.1.*", ("vendor",)),)))
    for layer in range(3):
        bind_op(OP, f"model.layers.{layer}.act")
    manifest = freeze_dispatch()
    mine = {key: choice[0]["runs"] for key, choice in manifest.choices.items() if key.split("@")[0] == OP}
    assert mine == {OP: ["default.a"], f"{OP}@model.layers.1.act": ["vendor.b"]}
    assert "order" in manifest.reasons[OP]
    assert {"fl_dispatch", "torch"} <= set(manifest.versions)
    assert Manifest.from_data(manifest.as_data()) == manifest
    assert Manifest.from_data(pickle.loads(pickle.dumps(manifest.as_data()))).hash == manifest.hash
    assert manifest.differences(manifest) == []


def _hash(prefer: str, answer: Any) -> None:
    set_global_policy(SelectionPolicy(prefer=prefer))
    get_default_manager().registry.register_many([impl("vendor.b", _two, op=OP)])
    bind_op("rms_norm", "model.norm")
    answer.put(freeze_dispatch().as_data())


def _two(x: Any) -> Any:
    return x + 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_with_the_same_choices_have_the_same_hash(method: str) -> None:
    context = multiprocessing.get_context(method)
    answers = []
    for prefer in ("reference", "reference", "vendor"):
        queue = context.Queue()
        process = context.Process(target=_hash, args=(prefer, queue))
        process.start()
        answers.append(Manifest.from_data(queue.get(timeout=120)))
        process.join(60)
    assert answers[0].hash == answers[1].hash != answers[2].hash
    assert {
        f"{OP}: reference.torch here, vendor.b there",
        "test_freezing: nothing here, unknown there",
    } <= {*answers[0].differences(answers[2])}  # on a GPU machine other kernels run without that preference, too


@pytest.mark.usefixtures("registered")
def test_a_forked_child_of_a_frozen_process_is_frozen_alike() -> None:
    frozen = freeze_dispatch()
    pid = os.fork()
    if pid == 0:
        same = freeze_dispatch() == frozen and run() == 1
        refused = False
        try:
            set_global_policy(SelectionPolicy(prefer="vendor"))
        except DispatchFrozenError:
            refused = True
        os._exit(0 if same and refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("way", ["by name", "bound"])
def test_a_thawed_call_has_all_the_care_that_a_frozen_one_has_not(way: str) -> None:
    """While dispatch is frozen nothing is copied, because a failure is raised: tables made for that must not stay."""

    def breaks(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
        x.fill_(-1)
        residual.fill_(-1)
        raise RuntimeError("half-way")

    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
        return x + residual, residual

    registry = get_default_manager().registry
    registry.clear()
    registry.register_many([impl("default.a", breaks, op="rms_norm"), impl("reference.b", add, op="rms_norm")])
    call = functools.partial(call_op, "rms_norm") if way == "by name" else bind_op("rms_norm", "layers.0")
    freeze_dispatch()
    with pytest.raises(RuntimeError, match="half-way"):
        call(torch.ones(2), torch.ones(2), torch.ones(2), 1e-6)
    thaw_dispatch()
    result, _ = call(torch.ones(2), torch.ones(2), torch.ones(2), 1e-6)
    assert result.eq(2).all()
