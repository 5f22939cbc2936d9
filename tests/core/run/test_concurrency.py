"""Threads, tasks, forks and dropped managers. Bounded in time."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

import storm as storms
from builders import impl, manager_of
from fl_dispatch import (
    OpManager,
    SelectionPolicy,
    bind_op,
    call_op,
    get_default_manager,
    locking,
    reset_default_manager,
    set_global_policy,
    weight_forms,
    with_preference,
)
from fl_dispatch.knowledge.failures import ArgumentKind, FailureLog
from fl_dispatch.locking import writers
from fl_dispatch.manager import start
from fl_dispatch.shadow.sampling import Sampling, SamplingOptions
from storm import fork_and_wait, quick_switches, storm, three

pytestmark = pytest.mark.usefixtures("results_are_names")

SECONDS = float(os.environ.get("FL_STRESS_SECONDS", "3"))
FORKS = int(os.environ.get("FL_STRESS_FORKS", "20"))


@pytest.fixture(autouse=True)
def switch_often() -> Any:
    with quick_switches():
        yield


def add_plugin(name: str, register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that the user named, with this registration function; the next call loads it."""
    module = types.ModuleType(name)
    module.register = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", name)
    reset_default_manager()


def test_calls_see_their_own_policy_while_others_register_and_change_the_global_one() -> None:
    figures = storm(seconds=SECONDS)
    assert figures.failures == []
    kinds = {"calls", "contexts", "managers", "policy changes", "registrations", "tasks"}
    assert {kind for kind in kinds if figures.counts[kind] > 0} == kinds


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_at_any_moment_calls() -> None:
    figures = storm(forks=FORKS)
    assert figures.failures == []
    assert figures.counts["forks"] == FORKS


def test_a_storm_notices_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the two tests above can fail."""
    monkeypatch.setattr(storms, "ACTIVATED", storms.ACTIVATED + 1)
    figures = storm(seconds=0.1, forks=2)
    assert any("a bound operator's numbers" in failure for failure in figures.failures)
    assert sum("a forked child's exit code" in failure for failure in figures.failures) == 2


def test_a_first_success_in_many_threads_at_once_is_right_in_all() -> None:
    manager = manager_of(*three())
    barrier = threading.Barrier(8)
    results: list[Any] = []

    def first() -> None:
        barrier.wait(10)
        results.append(manager.call("demo", 1))

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == ["default.a"] * 8


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_before_the_first_call_starts_the_child_anew() -> None:
    assert fork_and_wait(lambda: call_op("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)) == 0


def _child_policy(queue: Any) -> None:
    from fl_dispatch import get_policy

    queue.put((get_policy().prefer, call_op("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)))


@pytest.fixture
def new_forkserver() -> Iterator[None]:
    """None is left that an earlier test started, under the environment of that time."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.usefixtures("new_forkserver")
def test_a_fresh_process_reads_the_environment_and_calls(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_child_policy, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == ("reference", True)
    process.join(30)


def test_a_dropped_manager_is_collected() -> None:
    manager = manager_of(*three())
    bound = manager.bind("demo")
    with with_preference("vendor"):
        manager.call("demo", 1)
        bound(1)
    reference = weakref.ref(manager)
    del manager, bound
    gc.collect()
    assert reference() is None


def test_many_managers_leave_nothing_behind() -> None:
    gc.collect()
    before = sum(type(thing) is OpManager for thing in gc.get_objects())
    for _ in range(50):
        manager_of(*three()).call("demo", 1)
    gc.collect()
    assert sum(type(thing) is OpManager for thing in gc.get_objects()) <= before


def test_a_bound_operator_may_be_bound_while_others_call() -> None:
    together, x = threading.Barrier(3), torch.ones(1, 2)

    def bind_and_call() -> int:
        together.wait(30)
        return sum(bind_op("silu_and_mul", f"layers.{number % 50}")(x).numel() for number in range(300))

    with ThreadPoolExecutor(3) as threads:
        assert [each.result(60) for each in [threads.submit(bind_and_call) for _ in range(3)]] == [300] * 3


def test_a_writer_that_takes_its_time_deadlocks_nobody() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    inside, entering = threading.Event(), threading.Event()

    def slow_check() -> bool:
        inside.set()
        assert entering.wait(10)
        with with_preference("vendor"):
            set_global_policy(SelectionPolicy(prefer="flagos"))
        return True

    thread = threading.Thread(target=lambda: manager.registry.register_impl(impl("default.a", available=slow_check)))
    thread.start()
    assert inside.wait(10)
    entering.set()
    with with_preference("reference"):
        pass
    thread.join(10)
    assert not thread.is_alive()
    assert call_op("demo", 1) == "default.a"


def test_a_registration_while_another_thread_starts_is_not_lost() -> None:
    manager = manager_of()
    asked, registering = threading.Event(), threading.Event()

    def slow_check() -> bool:
        asked.set()
        return registering.wait(10)

    manager.registry.register_impl(impl("default.a", available=slow_check))
    starter = threading.Thread(target=lambda: manager.call("demo", 1))
    starter.start()
    assert asked.wait(10)
    registering.set()
    manager.registry.register_impl(impl("default.late", op="late"))
    starter.join(10)
    assert manager.call("late", 1) == "default.late"


def test_an_availability_check_may_register_and_dispatch() -> None:
    manager = get_default_manager()
    x = torch.ones(1, 2)

    def check() -> bool:
        manager.registry.register_impl(impl("default.lazy", op="lazy"))
        return call_op("silu_and_mul", x).shape == (1, 1)

    manager.registry.register_impl(impl("default.a", available=check))
    assert call_op("demo", 1) == "default.a"
    assert call_op("lazy", 1) == "default.lazy"


def test_a_plugin_may_dispatch_while_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def register(registry: Any) -> None:
        calls.append(call_op("silu_and_mul", torch.ones(1, 2)).numel())
        registry.register_impl(impl("default.plugin"))

    add_plugin("dispatching_plugin", register, monkeypatch)
    assert call_op("demo", 1) == "default.plugin"
    assert calls == [1]


def test_a_retired_manager_leaves_the_new_one_alone() -> None:
    old = get_default_manager()
    old.ensure_initialized()
    reset_default_manager()
    old.registry.register_impl(impl("vendor.old", lambda x: "old", op="silu_and_mul", priority=999))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert call_op("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)
    assert old.call("silu_and_mul", torch.ones(1, 2)) == "old"
    with with_preference("reference"):
        assert old.call("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)


def test_contexts_of_generators_that_end_out_of_order_leave_nothing() -> None:
    from fl_dispatch import get_policy

    def generator(prefer: str) -> Any:
        with with_preference(prefer):
            yield

    set_global_policy(SelectionPolicy())
    one, two = generator("reference"), generator("vendor")
    next(one)
    next(two)
    one.close()
    assert get_policy().prefer == "vendor"
    two.close()
    assert get_policy().prefer == "flagos"


def test_declining_a_thousand_times_rebuilds_nothing() -> None:
    def declines(x: Any) -> Any:
        raise NotImplementedError

    manager = manager_of(
        impl("default.a", declines, op="silu_and_mul"), impl("reference.b", lambda x: x[..., :1], op="silu_and_mul")
    )
    x = torch.ones(1, 2)
    manager.call("silu_and_mul", x)
    entries = manager.table_keeper.root.entries
    for _ in range(1000):
        manager.call("silu_and_mul", x)
    assert manager.table_keeper.root.entries is entries


# ---- what goes on while an availability check or a plugin takes its time


def test_an_explanation_meanwhile_does_not_hide_an_implementation() -> None:
    asked_again, go_on, times = threading.Event(), threading.Event(), []

    def check() -> bool:
        times.append(1)
        if len(times) == 2:
            asked_again.set()
            return go_on.wait(30)
        return True

    manager = manager_of(impl("default.a", available=check), impl("reference.b"))
    assert manager.call("demo", 1) == "default.a"
    with ThreadPoolExecutor(1) as threads:
        bumped = threads.submit(manager.ask_again)
        assert asked_again.wait(10)
        meanwhile = manager.explain("demo").chosen
        go_on.set()
        bumped.result(10)
    assert meanwhile.impl_id == "default.a"
    assert manager.call("demo", 1) == "default.a"


def test_threads_that_make_the_first_call_at_once_load_a_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together, times = threading.Barrier(4), []

    def register(registry: Any) -> None:
        times.append(1)
        registry.register_impl(impl("default.plugin"))

    add_plugin("counting_plugin", register, monkeypatch)

    def first() -> str:
        together.wait(30)
        answer: str = call_op("demo", 1)
        return answer

    with ThreadPoolExecutor(4) as threads:
        assert [each.result(60) for each in [threads.submit(first) for _ in range(4)]] == ["default.plugin"] * 4
    assert times == [1]


def test_a_backend_that_takes_too_long_is_done_without_until_it_has_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "WAIT_SECONDS", 0.1)
    inside, go_on = threading.Event(), threading.Event()

    def register(registry: Any) -> None:
        inside.set()
        assert go_on.wait(30)
        registry.register_impl(impl("vendor.slow", lambda x: "slow", op="silu_and_mul"))

    add_plugin("slow_plugin", register, monkeypatch)
    set_global_policy(SelectionPolicy(prefer="vendor", allow_vendors=frozenset({"slow"})))
    x = torch.ones(1, 2)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(get_default_manager().ensure_initialized)
        assert inside.wait(10)
        assert call_op("silu_and_mul", x).shape == (1, 1)
        assert "a call does without it" in caplog.text
        go_on.set()
        starting.result(30)
    assert get_default_manager().get_selected_impl_id("silu_and_mul") == "vendor.slow"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_a_module_that_a_backend_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody in the child would ever end that import, and an import of it there would wait for ever."""
    meeting = types.ModuleType("meeting_of_a_fork")
    meeting.inside, meeting.forking = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "meeting_of_a_fork", meeting)
    body = "from meeting_of_a_fork import inside, forking\ninside.set()\nassert forking.wait(20)\n"
    body += "import time\ntime.sleep(0.3)  # a fork that does not wait happens meanwhile\n"
    (tmp_path / "needed_by_the_child.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))

    def register(registry: Any) -> None:
        importlib.import_module("needed_by_the_child")

    add_plugin("importing_plugin", register, monkeypatch)
    os.register_at_fork(before=meeting.forking.set)  # runs before those that are registered already
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(get_default_manager().ensure_initialized)
        assert meeting.inside.wait(10)
        assert fork_and_wait(lambda: importlib.import_module("needed_by_the_child") is not None) == 0
        starting.result(30)


def test_a_fork_while_an_availability_check_hangs_asks_again_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "FORK_WAIT_SECONDS", 0.2)
    manager = get_default_manager()
    manager.ensure_initialized()
    inside, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def check() -> bool:
        inside.set()
        return os.getpid() != parent or go_on.wait(30)

    thread = threading.Thread(target=lambda: manager.registry.register_impl(impl("default.a", available=check)))
    thread.start()
    inside.wait(10)
    code = fork_and_wait(lambda: call_op("demo", 1) == "default.a")
    go_on.set()
    thread.join(10)
    assert code == 0
    assert call_op("demo", 1) == "default.a"


def test_a_fork_while_a_weight_is_prepared_prepares_it_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "FORK_WAIT_SECONDS", 0.2)
    inside, go_on, parent = threading.Event(), threading.Event(), os.getpid()
    one, two = torch.ones(2), torch.ones(2)

    def make(weight: torch.Tensor, before: object) -> str:
        inside.set()
        return "a form" if os.getpid() != parent or go_on.wait(30) else ""

    for weight in (one, two):
        weight_forms.declare(weight)
    thread = threading.Thread(target=lambda: weight_forms.of(one, "mine", make))
    thread.start()
    inside.wait(10)
    code = fork_and_wait(lambda: weight_forms.of(two, "mine", make) == "a form")
    go_on.set()
    thread.join(10)
    assert code == 0


def test_a_fork_while_shadow_mode_draws_a_call_draws_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "FORK_WAIT_SECONDS", 0.2)
    inside, go_on, started, parent = threading.Event(), threading.Event(), threading.Event(), os.getpid()

    def clock() -> float:
        if started.is_set() and os.getpid() == parent:
            inside.set()
            go_on.wait(30)
        return 1.0 if started.is_set() else 0.0

    sampling = Sampling(SamplingOptions(1.0, None, "reference", False, 1.0), clock)
    started.set()
    thread = threading.Thread(target=sampling.affordable)
    thread.start()
    inside.wait(10)
    code = fork_and_wait(sampling.affordable)
    go_on.set()
    thread.join(10)
    assert code == 0


def test_a_fork_while_a_plugin_loads_starts_the_child_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "FORK_WAIT_SECONDS", 0.2)
    inside, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def register(registry: Any) -> None:
        inside.set()
        if os.getpid() == parent:
            go_on.wait(30)
        registry.register_impl(impl("default.plugin"))

    add_plugin("slow_plugin", register, monkeypatch)
    thread = threading.Thread(target=get_default_manager().ensure_initialized)
    thread.start()
    inside.wait(10)
    code = fork_and_wait(lambda: call_op("demo", 1) == "default.plugin")
    go_on.set()
    thread.join(10)
    assert code == 0
    assert call_op("demo", 1) == "default.plugin"


def test_two_threads_that_fork_at_once_leave_the_lock_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the lock and gives up while the other one forks."""
    monkeypatch.setattr(locking, "FORK_WAIT_SECONDS", 0.1)
    lock = locking.ForkableLock()
    forking, other = threading.Event(), threading.Event()

    def fork() -> None:
        lock._before()
        forking.set()
        other.wait(10)
        lock._in_parent()

    thread = threading.Thread(target=fork)
    thread.start()
    forking.wait(10)
    lock._before()
    lock._in_parent()
    other.set()
    thread.join(10)
    entered = threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(5)


def test_calls_go_on_while_the_default_manager_is_reset_again_and_again() -> None:
    bound, x = bind_op("silu_and_mul", "layers.0"), torch.ones(1, 2)
    expected = bound(x)
    stop, errors = threading.Event(), []

    def caller() -> None:
        try:
            while not stop.is_set():
                with with_preference("reference"):
                    assert torch.equal(call_op("silu_and_mul", x), expected)
                assert torch.equal(bound(x), expected)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=caller) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + min(SECONDS, 2)
    while time.monotonic() < deadline and not errors:
        reset_default_manager()
        time.sleep(0.001)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert errors == []


CHANGES: dict[str, Callable[[FailureLog], Any]] = {
    "record": lambda log: log.record(impl("default.a"), ArgumentKind.of((), None), RuntimeError("x")),
    "clear": lambda log: log.clear(),
    "restore": lambda log: log.restore({}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_bans_waits_for_the_one_at_work(change: Callable[[FailureLog], Any]) -> None:
    """Else one of two failures at the same moment is lost."""
    log, done = FailureLog(), threading.Event()
    thread = threading.Thread(target=lambda: (change(log), done.set()), daemon=True)
    with writers:
        thread.start()
        assert not done.wait(0.3)
    assert done.wait(10)
