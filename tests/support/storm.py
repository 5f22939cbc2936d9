"""Threads, tasks and processes that call, register, change policies and enter contexts, all at once; counted.

Shared by ``test_concurrency.py`` (seconds) and ``benchmarks/stress.py`` (minutes). Every result is compared with the
one that the caller's own policy requires.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from builders import impl
from fl_dispatch import (
    OpManager,
    OpRegistry,
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    get_default_manager,
    reset_default_manager,
    set_global_policy,
    with_denied_vendors,
    with_preference,
)

EXPECTED = {"flagos": "default.a", "vendor": "vendor.b", "reference": "reference.c"}
CALLS_AT_ONCE = 50
REGISTRATIONS = 400  # then the registrar rests, so that tables do not grow for ever
CHILD_SECONDS = 30.0
X = torch.tensor([[0.5, -1.0, 2.0, 3.0]])
ACTIVATED = torch.nn.functional.silu(X[:, :2]) * X[:, 2:]


class Wrong(AssertionError):
    """Raised when a call ran another implementation than its own policy requires."""


@dataclass
class Figures:
    """The counts of a storm."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


Step = Callable[[random.Random, Counter[str]], None]


def three() -> list[Any]:
    """Return one implementation of each kind of the operator ``demo``."""
    return [impl(name) for name in EXPECTED.values()]


def expect(got: Any, wanted: Any, what: str) -> None:
    """Raise :class:`Wrong` unless both are equal."""
    if got != wanted:
        raise Wrong(f"{what}: {got!r} instead of {wanted!r}")


# ---- what the threads do, one step of each


def call_in_contexts(choose: random.Random, counts: Counter[str]) -> None:
    """Call in a context, in a nested one, and outside."""
    prefer = choose.choice(list(EXPECTED))
    with with_preference(prefer):
        for _ in range(CALLS_AT_ONCE):
            expect(call_op("demo", 1), EXPECTED[prefer], f"inside {prefer}")
        with with_denied_vendors("b"):
            nested = EXPECTED["flagos" if prefer == "vendor" else prefer]
            expect(call_op("demo", x=1), nested, f"inside {prefer}, vendor denied")
        expect(call_op("demo", 1), EXPECTED[prefer], f"inside {prefer} again")
    if call_op("demo", 1) not in EXPECTED.values():
        raise Wrong("outside")
    counts["calls"] += CALLS_AT_ONCE + 3
    counts["contexts"] += 2


def call_bound(choose: random.Random, counts: Counter[str]) -> None:
    """Bind an operator for one of many layers and call it."""
    bound = bind_op("silu_and_mul", f"layers.{choose.randrange(10)}")
    for _ in range(CALLS_AT_ONCE):
        if not torch.equal(bound(X), ACTIVATED):
            raise Wrong("a bound operator's numbers")
    counts["calls"] += CALLS_AT_ONCE


def call_what_fails_at_times(choose: random.Random, counts: Counter[str]) -> None:
    """Call an operator with a first implementation that fails now and then, so that another one takes over."""
    for _ in range(CALLS_AT_ONCE):
        expect(call_op("flaky", choose.random()), "right", "a fallback")
    counts["calls"] += CALLS_AT_ONCE


def fail_at_times(x: float) -> str:
    """Fail for one call in a thousand."""
    if x < 1e-3:
        raise RuntimeError("now and then")
    return "right"


def use_a_manager_of_its_own(choose: random.Random, counts: Counter[str]) -> None:
    """Make a manager; call first by name and bound, in a context and outside; then drop the manager."""
    registry = OpRegistry()
    registry.register_many(three())
    manager = OpManager(registry, register_builtins=False)
    prefer = choose.choice(list(EXPECTED))
    with with_preference(prefer):
        expect(manager.call("demo", 1), EXPECTED[prefer], "a manager's first call")
        expect(manager.bind("demo", "layers.0")(1), EXPECTED[prefer], "a manager's bound operator")
    counts["calls"] += 2
    counts["managers"] += 1


def change_the_global_policy(choose: random.Random, counts: Counter[str]) -> None:
    """Change the global policy, and at random lift bans, ask availability again, switch counting or explain."""
    set_global_policy(SelectionPolicy(prefer=choose.choice(list(EXPECTED))))
    manager = get_default_manager()
    choose.choice(
        [
            manager.clear_failed_impls,
            manager.ask_again,
            lambda: manager.set_counting(choose.random() < 0.5),
            lambda: explain("demo", 1),
        ]
    )()
    counts["policy changes"] += 1
    time.sleep(choose.random() * 0.002)


def registrar() -> Step:
    """Register better and better implementations; the next call must run each."""
    number = 0

    def register(choose: random.Random, counts: Counter[str]) -> None:
        nonlocal number
        number += 1
        if number <= REGISTRATIONS:
            op, name = f"late{number % 20}", f"default.{number}"
            get_default_manager().registry.register_impl(impl(name, op=op, priority=200 + number))
            expect(call_op(op, 1), name, "the call after a registration")
            counts["calls"] += 1
            counts["registrations"] += 1
        time.sleep(choose.random() * 0.02)

    return register


def run_tasks(choose: random.Random, counts: Counter[str]) -> None:
    """Run interleaved tasks, each in a separate context."""

    async def task(prefer: str) -> None:
        with with_preference(prefer):
            for _ in range(10):
                await asyncio.sleep(0)
                expect(call_op("demo", 1), EXPECTED[prefer], f"a task inside {prefer}")
            in_thread = await asyncio.to_thread(call_op, "demo", 1)
            expect(in_thread, EXPECTED[prefer], "a thread that a task asked")

    async def tasks() -> None:
        await asyncio.gather(*(task(choose.choice(list(EXPECTED))) for _ in range(12)))

    asyncio.run(tasks())
    counts["calls"] += 12 * 11
    counts["contexts"] += 12
    counts["tasks"] += 12


# ---- processes


def child_is_right() -> bool:
    """Whether a forked child gets right results: in a context, after changes of registry and policy, in a thread."""
    with with_preference("vendor"):
        right = call_op("demo", 1) == EXPECTED["vendor"]
        get_default_manager().registry.register_impl(impl("vendor.child", priority=500))
        right &= call_op("demo", 1) == "vendor.child"
    set_global_policy(SelectionPolicy(prefer="vendor"))
    right &= torch.equal(bind_op("silu_and_mul", "layers.3")(X), ACTIVATED)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call_op("demo", 1)))
    thread.start()
    thread.join()
    return right and results == ["vendor.child"]


def fork_and_wait(child: Callable[[], Any] = child_is_right, timeout: float = CHILD_SECONDS) -> int:
    """Fork; return the child's exit code: 0 right, 1 wrong, 2 it raised, -1 it hung and was killed."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if child() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


def fork_at_a_random_moment(choose: random.Random, counts: Counter[str]) -> None:
    """Fork, in half of the cases inside a context."""
    time.sleep(choose.random() * 0.005)
    with with_preference("reference") if choose.random() < 0.5 else contextlib.nullcontext():
        expect(fork_and_wait(), 0, "a forked child's exit code (1 wrong, 2 raised, -1 hung)")
    counts["forks"] += 1


def fresh_child_is_right(queue: Any) -> None:
    """Register and call in a spawned child, which has no state of its parent; put whether all results are right."""
    get_default_manager().registry.register_many(three())
    with with_preference("vendor"):
        right = call_op("demo", 1) == EXPECTED["vendor"]
    queue.put(right and torch.equal(call_op("silu_and_mul", X), ACTIVATED))


def start_a_fresh_child(method: str, counts: Counter[str]) -> None:
    """Start a child by ``spawn`` or ``forkserver``."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=fresh_child_is_right, args=(queue,))
    process.start()
    try:
        expect(queue.get(timeout=120), True, f"a child by {method}")
    finally:
        process.join(30)
    counts[method] += 1


# ---- together


@contextlib.contextmanager
def quick_switches(interval: float = 1e-5) -> Iterator[None]:
    """Make threads take turns more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log errors only: every fallback is a WARNING."""
    logger = logging.getLogger("fl_dispatch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def steps() -> list[Step]:
    """Return one step for each thread of a storm."""
    return [
        call_in_contexts,
        call_in_contexts,
        call_bound,
        call_what_fails_at_times,
        use_a_manager_of_its_own,
        change_the_global_policy,
        registrar(),
        run_tasks,
    ]


def storm(
    seconds: float = 0.0, forks: int = 0, fresh: int = 0, seed: int = 0, report: Callable[[Figures], None] | None = None
) -> Figures:
    """Run all of it at once in this process, on a new default manager.

    Args:
        seconds: shortest duration.
        forks: number of children forked meanwhile, by this thread and by another one.
        fresh: number of children started by ``spawn``, and as many by ``forkserver``.
        seed: of every choice.
        report: called now and then.
    """
    reset_default_manager()
    registry = get_default_manager().registry
    registry.register_many(three())
    registry.register_many(
        [impl("default.a", fail_at_times, op="flaky"), impl("reference.b", lambda x: "right", op="flaky")]
    )
    for op in ("demo", "flaky"):
        call_op(op, 1)
    stop, lock, figures = threading.Event(), threading.Lock(), Figures()
    started = time.monotonic()

    def act(step: Step, number: int, times: int | None = None) -> None:
        choose, counts = random.Random(f"{seed}/{number}"), Counter[str]()
        while not (stop.is_set() if times is None else times == 0):
            try:
                step(choose, counts)
            except BaseException as error:
                places = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
                with lock:
                    figures.failures.append(f"{type(error).__name__}: {error} ({' > '.join(places)})")
                if times is None:
                    break
            times = None if times is None else times - 1
            with lock:
                figures.counts += counts
            counts.clear()
            if choose.random() < 0.3:
                time.sleep(0.0005)  # or writers starve

    threads = [threading.Thread(target=act, args=(step, n), daemon=True) for n, step in enumerate(steps())]
    helper = threading.Thread(target=act, args=(fork_at_a_random_moment, -1, forks // 2), daemon=True)
    with quiet(), quick_switches():
        for thread in [*threads, helper]:
            thread.start()
        for method in ("spawn", "forkserver") * fresh:
            act(lambda _, counts, method=method: start_a_fresh_child(method, counts), -3, 1)
        for number in range(forks - forks // 2):
            act(fork_at_a_random_moment, -1000 - number, 1)
            if report and number % 25 == 0:
                figures.seconds = time.monotonic() - started
                report(figures)
        helper.join()
        time.sleep(max(0.0, seconds - (time.monotonic() - started)))
        stop.set()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                figures.failures.append("a thread hangs")
    figures.seconds = time.monotonic() - started
    return figures
