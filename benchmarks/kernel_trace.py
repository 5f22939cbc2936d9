"""A GPU's time by kernel and its idle time, from a trace of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that occupy the GPU."""
SHORT_US = 10.0
"""Bound of waits in µs: shorter ones are between kernels of one launch sequence, longer ones wait for the host."""
LAST = "_gumbel_sample"
"""Part of the name of the last kernel of vLLM's forward passes, which samples tokens."""
SHARE = 1e-3
"""Kernels with a smaller share of the busy time are added up as ``others``."""


def read(path: Path) -> dict[str, Any]:
    """Return the time of each kernel in µs, and the waits between kernels, from one trace.

    Args:
        path: a trace in Chrome's format, gzipped or not.

    Returns:
        ``kernels`` (name → calls and µs, the longest first), ``busy_us``, ``span_us`` (first start to last end),
        ``short_waits_us`` and ``long_waits_us`` (below and above :data:`SHORT_US`) and ``long_waits``, their number;
        ``passes_busy_us``, the busy time of each forward pass.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in WORK]
    events.sort(key=lambda event: event["ts"])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy, waits, end = 0.0, [], events[0]["ts"] if events else 0.0
    ends = [0.0]
    for event in events:
        start, stop = event["ts"], event["ts"] + event["dur"]
        row = kernels[event["name"]]
        row[0], row[1] = row[0] + 1, row[1] + event["dur"]
        if start > end:
            waits.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        if LAST in event["name"]:
            ends.append(busy)
    for name in [name for name, (_, us) in kernels.items() if us < SHARE * busy]:
        calls, us = kernels.pop(name)
        others = kernels["others"]
        others[0], others[1] = others[0] + calls, others[1] + us
    ordered = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "span_us": end - events[0]["ts"] if events else 0.0,
        "busy_us": busy,
        "passes_busy_us": [round(stop - start) for start, stop in pairwise(ends)],
        "short_waits_us": sum(wait for wait in waits if wait < SHORT_US),
        "long_waits_us": sum(wait for wait in waits if wait >= SHORT_US),
        "long_waits": sum(wait >= SHORT_US for wait in waits),
        "kernels": {name: {"calls": int(calls), "us": round(us, 1)} for name, (calls, us) in ordered},
    }


def table(trace: dict[str, Any], steps: int, rows: int = 25) -> str:
    """Return a table of the first ``rows`` kernels, in µs per step."""
    head = (
        f"a step: {trace['span_us'] / steps:,.1f} us, of which busy {trace['busy_us'] / steps:,.1f}, "
        f"waits below {SHORT_US:.0f} us {trace['short_waits_us'] / steps:,.1f}, "
        f"longer ones {trace['long_waits_us'] / steps:,.1f} ({trace['long_waits'] / steps:.1f} a step)"
    )
    lines = [
        f"{row['us'] / steps:10.1f} us {row['calls'] / steps:7.1f} x  {name[:110]}"
        for name, row in list(trace["kernels"].items())[:rows]
    ]
    return "\n".join([head, *lines])
