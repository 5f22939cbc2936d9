"""Threads, tasks, forks and dropped managers. Bounded in time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    OpManager,
    SelectionPolicy,
    bind_op,
    call_op,
    get_default_manager,
    set_global_policy,
    with_preference,
)

SECONDS = float(os.environ.get("FL_STRESS_SECONDS", "3"))
EXPECTED = {"flagos": "default.a", "vendor": "vendor.b", "reference": "reference.c"}


@pytest.fixture(autouse=True)
def quick_switches() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def three() -> list[Any]:
    return [impl(name) for name in EXPECTED.values()]


def test_calls_see_their_own_policy_while_others_register_and_change_the_global_one() -> None:
    manager = get_default_manager()
    manager.registry.register_many(three())
    stop = threading.Event()
    wrong: list[Any] = []
    calls = [0] * 4

    def caller(number: int) -> None:
        choose = random.Random(number)
        while not stop.is_set():
            prefer = choose.choice(list(EXPECTED))
            with with_preference(prefer):
                for _ in range(20):
                    calls[number] += 1
                    if (got := call_op("demo", 1)) != EXPECTED[prefer]:
                        wrong.append((prefer, got))

    def writer() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            set_global_policy(SelectionPolicy(prefer=random.choice(list(EXPECTED))))
            manager.registry.register_impl(impl(f"default.{number}", op=f"other{number % 5}"))
            manager.clear_failed_impls()

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(4)] + [threading.Thread(target=writer)]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert min(calls) > 0


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


def fork_and_wait(child: Any, timeout: float = 20) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if child() else 1)
        except BaseException:
            os._exit(2)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_at_any_moment_calls() -> None:
    manager = get_default_manager()
    manager.registry.register_many(three())
    call_op("demo", 1)
    stop = threading.Event()

    def storm(name: str) -> None:
        number = 0
        while not stop.is_set() and number < 5000:
            number += 1
            manager.registry.register_impl(impl(f"reference.{name}{number}", op=f"other{number % 9}"))
            set_global_policy(SelectionPolicy(prefer="vendor" if number % 2 else "flagos"))
            with with_preference("reference"):
                call_op("demo", 1)

    threads = [threading.Thread(target=storm, args=(name,), daemon=True) for name in "xy"]
    for thread in threads:
        thread.start()

    def child() -> bool:
        with with_preference("vendor"):
            right = call_op("demo", 1) == "vendor.b"
        manager.registry.register_impl(impl("vendor.child", priority=500))
        set_global_policy(SelectionPolicy(prefer="vendor"))
        return right and call_op("demo", 1) == "vendor.child"

    codes = [fork_and_wait(child) for _ in range(int(os.environ.get("FL_STRESS_FORKS", "60")))]
    stop.set()
    for thread in threads:
        thread.join(30)
    assert set(codes) == {0}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_before_the_first_call_starts_the_child_anew() -> None:
    assert fork_and_wait(lambda: call_op("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)) == 0


def _child_policy(queue: Any) -> None:
    from fl_dispatch import get_policy

    queue.put((get_policy().prefer, call_op("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
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
    stop = threading.Event()
    errors: list[BaseException] = []
    x = torch.ones(1, 2)

    def binder() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                bind_op("silu_and_mul", f"layers.{number % 50}")(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=binder) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(min(SECONDS, 2))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert errors == []


def test_a_writer_that_takes_its_time_deadlocks_nobody() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    inside = threading.Event()

    def slow_check() -> bool:
        inside.set()
        time.sleep(0.3)
        with with_preference("vendor"):
            set_global_policy(SelectionPolicy(prefer="flagos"))
        return True

    thread = threading.Thread(target=lambda: manager.registry.register_impl(impl("default.a", available=slow_check)))
    thread.start()
    inside.wait(10)
    with with_preference("reference"):
        pass
    thread.join(10)
    assert not thread.is_alive()
    assert call_op("demo", 1) == "default.a"


def test_a_registration_while_another_thread_starts_is_not_lost() -> None:
    manager = manager_of()
    asked, go_on = threading.Event(), threading.Event()

    def slow_check() -> bool:
        asked.set()
        return go_on.wait(0.3) or True

    manager.registry.register_impl(impl("default.a", available=slow_check))
    starter = threading.Thread(target=lambda: manager.call("demo", 1))
    starter.start()
    asked.wait(10)
    manager.registry.register_impl(impl("default.late", op="late"))
    go_on.set()
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
    import sys
    import types

    calls: list[int] = []

    def register(registry: Any) -> None:
        calls.append(call_op("silu_and_mul", torch.ones(1, 2)).numel())
        registry.register_impl(impl("default.plugin"))

    module = types.ModuleType("dispatching_plugin")
    module.register = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dispatching_plugin", module)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "dispatching_plugin")
    from fl_dispatch import reset_default_manager

    reset_default_manager()
    assert call_op("demo", 1) == "default.plugin"
    assert calls == [1]


def test_a_retired_manager_leaves_the_new_one_alone() -> None:
    from fl_dispatch import reset_default_manager

    old = get_default_manager()
    old.ensure_initialized()
    reset_default_manager()
    old.registry.register_impl(impl("vendor.old", lambda x: "old", op="silu_and_mul", priority=999))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert call_op("silu_and_mul", torch.ones(1, 2)).shape == (1, 1)
    assert old.call("silu_and_mul", torch.ones(1, 2)) == "old"


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
        impl("default.a", declines, op="silu_and_mul"), impl("reference.b", lambda x: x, op="silu_and_mul")
    )
    x = torch.ones(1, 2)
    manager.call("silu_and_mul", x)
    entries = manager.tables.root.entries
    for _ in range(1000):
        manager.call("silu_and_mul", x)
    assert manager.tables.root.entries is entries
