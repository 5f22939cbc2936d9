"""What a dispatched call costs over the direct call of the same function.

One process, one core, interleaved rounds: every round times the direct call and each way of dispatching, so that a
change of the machine's speed hits all alike. Printed is the minimum and the median of the differences, in microseconds
a call.

    python benchmarks/dispatch_cost.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    bind_op,
    call_op,
    get_default_manager,
    policy_context,
    resolve_op,
    set_global_policy,
)
from fl_dispatch.cli.output import print_table

ROUNDS, CALLS = 41, 20_000


def rms_norm(x: Any, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    return x


def supported(x: Any, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    return x


class Layer:
    weight = None
    variance_epsilon = 1e-6


def measure(
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], rounds: int, calls: int
) -> dict[str, dict[str, float]]:
    """Times each way against its direct call; both run in loops made by the same template."""
    differences: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (way, direct) in ways.items():
            started = time.thread_time()
            way()
            middle = time.thread_time()
            direct()
            differences[name].append(((middle - started) - (time.thread_time() - middle)) / calls * 1e6)
    return {
        name: {"min_us": min(d), "median_us": statistics.median(d), "p90_us": sorted(d)[int(len(d) * 0.9)]}
        for name, d in differences.items()
    }


def loop(expression: str, calls: int, **names: Any) -> Callable[[], None]:
    """A function that evaluates one expression ``calls`` times."""
    source = f"def run():\n    for _ in range({calls}):\n        {expression}\n"
    namespace: dict[str, Any] = dict(names)
    exec(source, namespace)
    run: Callable[[], None] = namespace["run"]
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    set_global_policy(SelectionPolicy())
    registry = get_default_manager().registry
    registry.register_impl(OpImpl("rms_norm", "default.bench", BackendImplKind.DEFAULT, rms_norm, priority=999))
    registry.register_impl(
        OpImpl(
            "gemma_rms_norm",
            "default.bench",
            BackendImplKind.DEFAULT,
            supported,
            priority=999,
            supports=lambda x, r, w, e: True,
        )
    )
    x = torch.ones(4)
    names = {
        "x": x,
        "call_op": call_op,
        "resolve_op": resolve_op,
        "bound": bind_op("rms_norm"),
        "bound_supports": bind_op("gemma_rms_norm"),
        "fn": rms_norm,
        "layer": Layer(),
    }
    expressions = {
        "call_op, 4 positional": ("call_op('rms_norm', x, None, None, 1e-6)", "fn(x, None, None, 1e-6)"),
        "call_op, 1 positional": ("call_op('rms_norm', x)", "fn(x)"),
        "call_op, 2 keywords": (
            "call_op('rms_norm', x, None, weight=None, epsilon=1e-6)",
            "fn(x, None, weight=None, epsilon=1e-6)",
        ),
        "call_op, layer first": (
            "call_op('rms_norm', layer, x, None)",
            "fn(x, None, layer.weight, layer.variance_epsilon)",
        ),
        "call_op, with supports": ("call_op('gemma_rms_norm', x, None, None, 1e-6)", "fn(x, None, None, 1e-6)"),
        "bound, 4 positional": ("bound(x, None, None, 1e-6)", "fn(x, None, None, 1e-6)"),
        "bound, 2 keywords": ("bound(x, None, weight=None, epsilon=1e-6)", "fn(x, None, weight=None, epsilon=1e-6)"),
        "bound, with supports": ("bound_supports(x, None, None, 1e-6)", "fn(x, None, None, 1e-6)"),
        "resolve_op": ("resolve_op('rms_norm')", "fn"),
    }
    for way, _ in expressions.values():
        for _ in range(3):
            loop(way, 1, **names)()
    ways = {
        name: (loop(way, arguments.calls, **names), loop(direct, arguments.calls, **names))
        for name, (way, direct) in expressions.items()
    }
    slow = ways.pop("resolve_op")
    results = measure(ways, arguments.rounds, arguments.calls)
    with policy_context(SelectionPolicy(deny_vendors=frozenset({"nobody"}))):
        call_op("rms_norm", x)
        names["bound"](x)
        call_op("rms_norm", x, x)
        names["bound"](x, x)
        inside = measure(
            {name: ways[name] for name in ("call_op, 4 positional", "bound, 4 positional")},
            arguments.rounds,
            arguments.calls,
        )
    after = measure(
        {name: ways[name] for name in ("call_op, 4 positional", "bound, 4 positional")},
        arguments.rounds,
        arguments.calls,
    )
    results |= {f"{name}, inside a context": value for name, value in inside.items()}
    results |= {f"{name}, after a context": value for name, value in after.items()}
    results |= measure({"resolve_op": slow}, 3, arguments.calls)
    print_table(
        "Cost over the direct call, microseconds",
        ("way", "minimum", "median", "90th percentile"),
        ((name, *(f"{value:.3f}" for value in row.values())) for name, row in results.items()),
    )
    if arguments.json:
        machine = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        machine |= {"rounds": arguments.rounds, "calls": arguments.calls, "date": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
