"""The cost of a dispatched call over the direct call of the same function.

One process on one core runs interleaved rounds: every round times the direct call and each way of dispatching, so that
a change of the machine's speed affects all alike. The clock is the processor time of the thread, so other work does not
count. The output is the minimum and the median of the differences, in microseconds per call, and the goal.

    python benchmarks/dispatch_cost.py [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    bind_op,
    call_op,
    freeze_dispatch,
    get_default_manager,
    policy_context,
    resolve_op,
    set_global_policy,
    thaw_dispatch,
)
from fl_dispatch.cli.output import print_table
from fl_dispatch.compiled import views as opaque
from fl_dispatch.evidence.origin import write
from fl_dispatch.manager.process import ROOT
from fl_dispatch.ops import OPERATORS

ROUNDS, CALLS = 41, 20_000
VIEW_CALLS = 20  # divisor of the calls: a view costs as much as tens of calls
GOALS = {  # DESIGN 3.10, microseconds
    "call_op, 4 positional": 0.20,
    "call_op, 1 positional": 0.20,
    "call_op, 2 keywords": 0.40,
    "call_op, layer first": 0.30,
    "bound, 4 positional": 0.10,
    "bound, the first candidate declines": 1.0,
    "call_op, 4 positional, after a context": 0.20,
    "bound, 4 positional, after a context": 0.12,
    "frozen, 4 positional": 0.0,
    "torch.library view, no grad": 2.7,
}


def rms_norm(x: Any, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    return x if residual is None else (x, residual)


def supported(x: Any, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    return x if residual is None else (x, residual)


def gelu_and_mul(x: Any, approximate: str = "none") -> Any:
    return x.new_empty(2)


def silu_and_mul(x: Any) -> Any:
    return x[:2]


class Layer:
    weight = None
    variance_epsilon = 1e-6


Way = tuple[Callable[[], Any], Callable[[], Any], int]


def measure(ways: dict[str, Way], rounds: int) -> dict[str, dict[str, float]]:
    """Time each way against its direct call; both run in loops made by the same template."""
    differences: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (way, direct, calls) in ways.items():
            started = time.thread_time()
            way()
            middle = time.thread_time()
            direct()
            differences[name].append(((middle - started) - (time.thread_time() - middle)) / calls * 1e6)
    return {
        name: {"min_us": min(d), "median_us": statistics.median(d), "p90_us": sorted(d)[int(len(d) * 0.9)]}
        for name, d in differences.items()
    }


def loop(expressions: tuple[str, ...], calls: int, names: dict[str, Any]) -> Callable[[], None]:
    """Return a function that evaluates expressions in turn, ``calls`` in all."""
    lines = "".join(f"        {expression}\n" for expression in expressions)
    source = f"def run():\n    for _ in range({max(1, calls // len(expressions))}):\n{lines}"
    namespace = dict(names)
    exec(source, namespace)
    run: Callable[[], None] = namespace["run"]
    return run


def way(way: str | tuple[str, ...], direct: str | tuple[str, ...], calls: int, names: dict[str, Any]) -> Way:
    """Return a way of calling and the direct call, both warmed up."""
    ways, directs = (part if isinstance(part, tuple) else (part,) for part in (way, direct))
    for expression in ways:
        for _ in range(3):
            loop((expression,), 1, names)()
    calls = max(1, calls // len(ways)) * len(ways)
    return loop(ways, calls, names), loop(directs, calls, names), calls


@contextmanager
def frozen() -> Iterator[None]:
    freeze_dispatch()
    try:
        yield
    finally:
        thaw_dispatch()


def prepare() -> dict[str, Any]:
    """Register the measured operators; return the names that the expressions use."""
    set_global_policy(SelectionPolicy())
    registry = get_default_manager().registry
    many = [OpImpl(f"op{index}", "default.bench", BackendImplKind.DEFAULT, lambda x: x) for index in range(40)]
    registry.register_many(
        [
            OpImpl("rms_norm", "default.bench", BackendImplKind.DEFAULT, rms_norm, priority=999),
            OpImpl("gelu_and_mul", "default.bench", BackendImplKind.DEFAULT, gelu_and_mul, priority=999),
            OpImpl(
                "gemma_rms_norm",
                "default.bench",
                BackendImplKind.DEFAULT,
                supported,
                priority=999,
                supports=lambda x, r, w, e: True,
            ),
            OpImpl(
                "silu_and_mul",
                "default.bench",
                BackendImplKind.DEFAULT,
                silu_and_mul,
                priority=999,
                supports=lambda x: "nothing",
            ),
            OpImpl("silu_and_mul", "default.next", BackendImplKind.DEFAULT, silu_and_mul, priority=998),
            *many,
        ]
    )
    x = torch.ones(4)
    call_op("rms_norm", x, x)  # proven also with arguments that it may overwrite
    call_op("gemma_rms_norm", x, x)
    return {
        "x": x,
        "call_op": call_op,
        "resolve_op": resolve_op,
        "bound": bind_op("rms_norm"),
        "bound_supports": bind_op("gemma_rms_norm"),
        "bound_declines": bind_op("silu_and_mul"),
        "view": opaque.view(ROOT, OPERATORS["gelu_and_mul"]),
        "fn": rms_norm,
        "silu": silu_and_mul,
        "gelu": gelu_and_mul,
        "layer": Layer(),
        **{f"op{index}": impl.fn for index, impl in enumerate(many)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    arguments = parser.parse_args()
    rounds, calls = arguments.rounds, arguments.calls
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    names = prepare()
    four, none = "x, None, None, 1e-6", "fn(x, None, None, 1e-6)"

    def turns(count: int) -> Way:
        indices = range(count)
        return way(tuple(f"call_op('op{i}', x)" for i in indices), tuple(f"op{i}(x)" for i in indices), calls, names)

    named, bound = way(f"call_op('rms_norm', {four})", none, calls, names), way(f"bound({four})", none, calls, names)
    ways = {
        "call_op, 4 positional": named,
        "call_op, 1 positional": way("call_op('rms_norm', x)", "fn(x)", calls, names),
        "call_op, 2 keywords": way(
            "call_op('rms_norm', x, None, weight=None, epsilon=1e-6)",
            "fn(x, None, weight=None, epsilon=1e-6)",
            calls,
            names,
        ),
        "call_op, layer first": way(
            "call_op('rms_norm', layer, x, None)",
            "fn(x, None, layer.weight, layer.variance_epsilon)",
            calls,
            names,
        ),
        "call_op, with supports": way(f"call_op('gemma_rms_norm', {four})", none, calls, names),
        **{f"call_op, {count} operators in turn": turns(count) for count in (1, 4, 40)},
        "bound, 4 positional": bound,
        "bound, 2 keywords": way(
            "bound(x, None, weight=None, epsilon=1e-6)", "fn(x, None, weight=None, epsilon=1e-6)", calls, names
        ),
        "bound, with supports": way(f"bound_supports({four})", none, calls, names),
        "bound, the first candidate declines": way("bound_declines(x)", "silu(x)", calls // VIEW_CALLS, names),
        "resolve_op": way("resolve_op('rms_norm')", "fn", calls // VIEW_CALLS, names),
    }
    results = measure(ways, rounds)
    with torch.no_grad():
        view = way("view(x, 'none')", "gelu(x, 'none')", calls // VIEW_CALLS, names)
        results |= measure({"torch.library view, no grad": view}, rounds)
    with frozen():
        names["frozen"] = bind_op("rms_norm")
        results |= measure(
            {
                "frozen, 4 positional": way(f"frozen({four})", none, calls, names),
                "frozen, call_op, 4 positional": named,
            },
            rounds,
        )
    again = {"call_op, 4 positional": named, "bound, 4 positional": bound}
    with policy_context(SelectionPolicy(deny_vendors=frozenset({"nobody"}))):
        for _ in range(3):
            call_op("rms_norm", names["x"], names["x"])
            names["bound"](names["x"], names["x"])
        results |= {f"{name}, inside a context": value for name, value in measure(again, rounds).items()}
    results |= {f"{name}, after a context": value for name, value in measure(again, rounds).items()}
    print_table(
        "Cost over the direct call, microseconds",
        ("way", "minimum", "median", "90th percentile", "goal"),
        (
            (name, *(f"{value:.3f}" for value in row.values()), f"{GOALS[name]:.2f}" if name in GOALS else "")
            for name, row in results.items()
        ),
    )
    if arguments.json:
        machine = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        machine |= {"rounds": rounds, "calls": calls, "date": time.strftime("%Y-%m-%d")}
        write(arguments.json, {"machine": machine, "goals_us": GOALS, "results": results})


if __name__ == "__main__":
    main()
