"""The cost of binding the layers of a model, of changing the policy once they are bound, and of the record of a run.

Meanwhile a second thread calls an operator repeatedly, also in a known context, because no reader may wait for a
writer. The output is wall-clock seconds, and the processor time of the working thread. With ``--count`` it is the
number of functions that the working thread calls, which is the same in each run.

    python benchmarks/binding_cost.py [--layers 500] [--operators 20] [--kept 64] [--tenants 0] [--count] [--json FILE]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_dispatch import SelectionPolicy, bind_op, call_op, policy_context, set_global_policy
from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.origin import write
from fl_dispatch.hosting.records.report import RunReport
from fl_dispatch.ops import OPERATORS

X = torch.ones(1, 2)
BIND, BIND_MORE, CHANGE = "bind the layers", "bind ten more layers", "change the policy"
RECORD, LOOK = "put the record of the run together", "look whether it has changed"
ENTER = "enter the contexts whose policies are kept"
TURNS = 5  # the median counts, because a full garbage collection of 0.2 s falls into one
GOALS = {BIND: 5.0, CHANGE: 2.0}  # wall-clock seconds on two cores, for the default numbers
LONGEST_WAIT = 0.1  # seconds of a reader: Python switches threads every 5 ms, and a busy machine adds to that


class Reader(threading.Thread):
    """A thread that calls an operator repeatedly, and keeps the longest time of a call."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self._over = 0.0, threading.Event()
        self._call()  # the first call in a context makes its table

    def _call(self) -> None:
        call_op("silu_and_mul", X)
        with policy_context(SelectionPolicy(prefer="reference")):
            call_op("silu_and_mul", X)

    def run(self) -> None:
        while not self._over.wait(0.001):
            started = time.perf_counter()
            self._call()
            self.longest = max(self.longest, time.perf_counter() - started)

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.longest


def measure(work: Callable[[], None]) -> dict[str, float]:
    """Return seconds of the clock and of this thread for some work, and a reader's longest call during it."""
    reader = Reader()
    reader.start()
    clock, processor = time.perf_counter(), time.thread_time()
    work()
    row = {"seconds": time.perf_counter() - clock, "processor": time.thread_time() - processor}
    return {**row, "longest_call": reader.stop()}


def count(work: Callable[[], None]) -> dict[str, int]:
    """Return how many functions, also those written in C, this thread calls for some work."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        work()
    finally:
        sys.setprofile(None)
    return {"calls": calls["call"] + calls["c_call"]}


def bind(operators: list[str], layers: range) -> None:
    for layer in layers:
        for name in operators:
            bind_op(name, f"model.layers.{layer}.{name}")


def goal(name: str) -> str:
    return f"{GOALS[name]:.1f}" if name in GOALS else ""


def keep(policies: int) -> None:
    """Enter contexts with different policies, as requests do; their tables are kept for later ones."""
    for number in range(policies):
        with policy_context(SelectionPolicy(deny_vendors=frozenset({f"nobody{number}"}))):
            call_op("silu_and_mul", X)


def in_turns(policies: int) -> dict[str, float]:
    """Return the milliseconds to enter a context when one policy per tenant alternates, and the bytes of a table."""
    kept = [SelectionPolicy(per_op_order=((f"rms_norm@tenant{number}", ("reference",)),)) for number in range(policies)]

    def enter() -> None:
        for policy in kept:
            with policy_context(policy):
                call_op("silu_and_mul", X)

    tracemalloc.start()
    enter()
    bytes_of_each = tracemalloc.get_traced_memory()[0] / policies
    tracemalloc.stop()
    rounds = []
    for _ in range(TURNS):
        started = time.thread_time()
        enter()
        rounds.append((time.thread_time() - started) / policies * 1e3)
    return {"milliseconds": statistics.median(rounds), "bytes": bytes_of_each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=500)
    parser.add_argument("--operators", type=int, default=20)
    parser.add_argument("--kept", type=int, default=64, help="policies that contexts had")
    parser.add_argument("--tenants", type=int, default=0, help="policies that take turns, compared with 60")
    parser.add_argument("--count", action="store_true", help="count calls of functions instead of seconds")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    operators = [name for name, operator in OPERATORS.items() if not operator.selection][: arguments.operators]
    record = RunReport()
    more = range(arguments.layers, arguments.layers + 10)
    take = count if arguments.count else measure
    results: dict[str, Any] = {
        BIND: take(lambda: bind(operators, range(arguments.layers))),
        ENTER: take(lambda: keep(arguments.kept)),
        BIND_MORE: take(lambda: bind(operators, more)),
        CHANGE: take(lambda: set_global_policy(SelectionPolicy(prefer="vendor")) and None),
        RECORD: take(lambda: record.choices() and None),
        LOOK: take(lambda: record.choices() and None),
    }
    tenants = (60, arguments.tenants) if arguments.tenants else ()
    results |= {f"{policies} policies in turn": in_turns(policies) for policies in tenants}
    for name, row in results.items():
        if "milliseconds" in row:
            print(f"{name}: {row['milliseconds']:.3f} ms an entry, {row['bytes'] / 1024:.0f} KiB a table")
    case_of = f"{arguments.layers} layers of {len(operators)} operators, {arguments.kept} kept policies"
    if arguments.count:
        rows = ((name, str(row["calls"])) for name, row in results.items() if "calls" in row)
        print_table(case_of, ("what", "calls of functions"), rows)
    else:
        print_table(
            f"{case_of}; seconds",
            ("what", "clock", "goal", "processor", f"longest call of a reader (goal {LONGEST_WAIT})"),
            (
                (name, f"{row['seconds']:.3f}", goal(name), f"{row['processor']:.3f}", f"{row['longest_call']:.3f}")
                for name, row in results.items()
                if "seconds" in row
            ),
        )
    if arguments.json:
        machine = {"python": sys.version.split()[0], "torch": torch.__version__, "machine": platform.machine()}
        case = {"layers": arguments.layers, "operators": len(operators), "kept": arguments.kept}
        write(arguments.json, {"machine": machine, **case, "results": results})


if __name__ == "__main__":
    main()
