"""Time candidates for the constants of sparse latent attention's Triton kernels.

The shape is that of DeepSeek-V3.2: 128 heads or the 16 of a rank of eight, latent rows of 512 + 64 numbers, 2,048
listed tokens, and 64 index heads of 128. A batch decodes after a context, or is a chunk at the end of a prompt. Its
blocks are at random places in a KV cache larger than the chip's cache, and its lists are random, so neighbours share
few rows. Constants are tried one after the other, each with the fastest values of the earlier ones; a candidate with
other results than the current constants is reported and skipped. Copy the fastest into ``sparse_latent.py`` and
``index_topk.py`` by hand. Times are device times in graphs. The floors are the bytes at the rate of a copy, and the
operations at the rate of a matrix product, both measured first. The last line compares attention to listed tokens,
including the making of the list, with dense latent attention to all tokens.

    python benchmarks/sparse_latent_tiles.py [--parts attention,lists,dense] [--contexts 32768 131072]
        [--requests 1 8 32] [--chunk 2048] [--heads 128 16] [--index-caches bfloat16 float8_e4m3fn] [--as-it-is]
        [--hopper-lists] [--hopper-scores] [--json FILE]

``--index-caches``: types of index keys, in which they are also multiplied with queries. ``--as-it-is``: no candidates.
``--hopper-lists``: attention by the kernel for Hopper; the plain kernel otherwise. ``--hopper-scores``: the same of the
lists' scores. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from fl_dispatch.backends.triton.impl import hopper
from fl_dispatch.backends.triton.impl.attention import index_topk, latent_decode, sparse_latent
from fl_dispatch.evidence.bench import calls_of
from fl_dispatch.evidence.origin import write
from fl_dispatch.evidence.rates import sets_to_rotate
from fl_dispatch.evidence.timing import Clock
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.quantization import FP8

RANK, ROPE, TOPK, INDEX_HEADS, INDEX_DIM, BLOCK_SIZE = 512, 64, 2048, 64, 128, 64
POOL = 1 << 32
"""Bytes of a cache; a batch that needs more gets more."""
COPIED = 1 << 29
"""Bytes of the timed copy."""
AS_IT_IS = "as it is"
Constants = Mapping[str, Any]
Arguments = tuple[Any, ...]
LARGE = (
    (64, 32, 8, 4), (64, 32, 8, 3), (64, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (32, 64, 8, 2), (32, 64, 4, 2),
    (32, 32, 4, 4), (16, 64, 4, 3), (64, 16, 4, 4),
)  # fmt: skip
SMALL = (
    (16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 8, 2), (16, 32, 4, 4), (16, 32, 4, 5), (16, 32, 8, 3), (16, 16, 4, 6),
    (16, 128, 8, 2),
)  # fmt: skip
"""Heads, listed rows, warps and stages."""
SCORING = ((256, 64, 4, 3), (128, 128, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4), (128, 32, 4, 4))
SCORING_DECODE = ((128, 1, 4, 1), (256, 1, 8, 1))
"""Tokens, queries, warps and stages."""
SCORING_HOPPER = (
    (4, 1, 64, 8), (2, 2, 64, 8), (3, 2, 128, 8), (3, 2, 32, 8), (3, 2, 64, 4), (3, 2, 64, 16), (4, 1, 128, 8),
)  # fmt: skip
"""Groups of warps, tiles of 64 tokens of each, queries and stages."""
SELECTING = (
    (32768, 2048, 11, 8), (32768, 4096, 11, 8), (32768, 8192, 11, 8), (32768, 4096, 11, 16), (32768, 1024, 11, 4),
    (32768, 2048, 10, 8), (32768, 2048, 8, 8), (32768, 4096, 8, 8), (32768, 8192, 8, 16), (16384, 4096, 11, 16),
    (16384, 4096, 8, 16), (16384, 2048, 8, 8), (8192, 2048, 8, 16),
)  # fmt: skip
"""Scores of a program, of a tile, bits of a digit, warps."""


def candidates(part: str, heads: int, decoding: bool) -> dict[str, tuple[Any, ...]]:
    """Constant of the part's module → its values."""
    if part == "attention":
        large = {"TILE_LARGE": LARGE, "FEW_ROWS": (0, 512, 1024)}
        tiles = large if heads >= sparse_latent.MANY_HEADS else {"TILE": SMALL}
        return tiles | ({"LEAST_ROWS": (64, 256), "MOST_SPLITS": (8, 16, 64)} if decoding else {})
    if decoding:
        return {"SCORING_DECODE": SCORING_DECODE, "SELECTING_DECODE": SELECTING}
    scoring = {"SCORING_HOPPER": SCORING_HOPPER} if hopper.TESTED_SCORES else {"SCORING": SCORING}
    return scoring | {"SELECTING": SELECTING}


class Batch:
    """Requests of ``context`` tokens, of which the last ``new`` are queries.

    Args:
        device: where it lies.
        requests, new, context: its size.
    """

    def __init__(self, device: torch.device, requests: int, new: int, context: int) -> None:
        self.device, self.requests, self.new, self.context = device, requests, new, context
        self.tokens, self.blocks = requests * new, -(-context // BLOCK_SIZE)
        self.starts = torch.arange(0, self.tokens + 1, new, dtype=torch.int32, device=device)
        self.lengths = torch.full((requests,), context, dtype=torch.int32, device=device)

    def __str__(self) -> str:
        if self.new == 1:
            return f"decode, {self.requests} x {self.context:,}"
        return f"last {self.new:,} of {self.context:,}"

    def pool(self, slot_bytes: int) -> int:
        """Return the number of blocks of a cache."""
        return max(self.requests * self.blocks, POOL // (BLOCK_SIZE * slot_bytes))

    def table(self, pool: int) -> Tensor:
        """Return a table with other blocks at each call."""
        order = torch.randperm(pool, device=self.device)[: self.requests * self.blocks]
        return order.int().view(self.requests, self.blocks)

    def listed(self) -> Tensor:
        """Return random positions in ascending order that a query attends to."""
        lists = torch.full((self.tokens, TOPK), -1, dtype=torch.int32, device=self.device)
        for token in range(self.tokens):
            seen = self.context - self.new + token % self.new + 1
            drawn = torch.randperm(seen, device=self.device)[:TOPK].sort().values
            lists[token, : len(drawn)] = drawn.int()
        return lists


def attention(batch: Batch, heads: int, stored: torch.dtype) -> Iterator[Arguments]:
    """Yield arguments of ``mla_sparse``, with other blocks and lists each time."""
    query = torch.randn(batch.tokens, heads, RANK, device=batch.device).bfloat16()
    rope = torch.randn(batch.tokens, heads, 2 * ROPE, device=batch.device).bfloat16()[..., ROPE:]
    pool = batch.pool((RANK + ROPE) * stored.itemsize)
    cache = filled(pool, RANK + ROPE, stored, batch.device)
    scale = 1.0 if stored is FP8 else None
    while True:
        lists, table = batch.listed(), batch.table(pool)
        yield query, cache, lists, table, batch.starts, batch.new, 0.1, RANK, None, scale, rope


def lists(batch: Batch, heads: int, stored: torch.dtype) -> Iterator[Arguments]:
    """Yield arguments of ``index_topk``, with other blocks each time."""
    query = torch.randn(batch.tokens, INDEX_HEADS, INDEX_DIM, device=batch.device).bfloat16()
    weights = torch.randn(batch.tokens, INDEX_HEADS, device=batch.device)
    pool = batch.pool(INDEX_DIM * stored.itemsize)
    cache = filled(pool, INDEX_DIM, stored, batch.device)
    scales = torch.ones(pool, BLOCK_SIZE, 1, device=batch.device) if stored is FP8 else None
    counts = (batch.starts, batch.lengths, batch.new, batch.context, TOPK)
    while True:
        yield query, weights, cache, batch.table(pool), *counts, None, scales


def dense(batch: Batch, heads: int, stored: torch.dtype) -> Iterator[Arguments]:
    """Yield arguments of ``mla_decode``, with other blocks each time."""
    for query, cache, _, table, starts, new, scale, rank, out, cache_scale, rope in attention(batch, heads, stored):
        yield query, cache, table, starts, batch.lengths, new, batch.context, scale, rank, out, True, cache_scale, rope


def filled(blocks: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cache of random numbers."""
    cache = torch.empty(blocks, BLOCK_SIZE, width, dtype=dtype, device=device)
    step = max(1, (1 << 26) // (BLOCK_SIZE * width))
    for first in range(0, blocks, step):
        some = cache[first : first + step]
        some.copy_(torch.randn(some.shape, device=device))
    return cache


PARTS: Mapping[str, tuple[str, Any, Callable[[Batch, int, torch.dtype], Iterator[Arguments]]]] = {
    "attention": ("mla_sparse", sparse_latent, attention),
    "lists": ("index_topk", index_topk, lists),
    "dense": ("mla_decode", latent_decode, dense),
}
"""Part → operator, module, arguments."""


class Rates:
    """Bytes a second of a copy, and sums a second of a product in bfloat16."""

    def __init__(self, clock: Clock) -> None:
        source, target = (torch.empty(COPIED, dtype=torch.uint8, device=clock.device) for _ in range(2))
        square = torch.randn(8192, 8192, device=clock.device, dtype=torch.bfloat16)
        clock.warm_up(partial(torch.mm, square, square))
        self.moved = 2 * COPIED / clock.time([partial(target.copy_, source)]).median
        self.summed = 2 * 8192**3 / clock.time([partial(torch.mm, square, square)]).median


def near(result: Tensor, expected: Tensor) -> bool:
    """Whether lists are equal, or results differ by no more than rounding."""
    if not result.dtype.is_floating_point:
        return torch.equal(result, expected)
    error = (result.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt()
    return bool(error < 0.01)


class Trial:
    """A part's operator on one batch, timed with constants in place of those of its module."""

    def __init__(self, clock: Clock, part: str, batch: Batch, heads: int, stored: torch.dtype) -> None:
        name, self.module, made = PARTS[part]
        self.clock, self.part, self.heads, self.decoding = clock, part, heads, batch.new == 1
        rotating = made(batch, heads, stored)
        first, operator = next(rotating), OPERATORS[name]
        assert operator.work is not None
        self.work = operator.work(*operator.bind(first, {}))
        count = sets_to_rotate(clock.device, self.work.bytes_moved) if self.decoding else 1
        self.sets = [first, *(next(rotating) for _ in range(count - 1))]
        self.function = getattr(self.module, name)
        shape = {"attention": f"{heads} heads, ", "dense": f"{heads} heads, "}.get(part, "")
        self.name = f"{part}, {shape}{batch}, {str(stored).removeprefix('torch.')}"
        self.expected = self.function(*first)
        if part == "attention":
            rows = first[0], first[-1], first[1]
            self.name += ", by the kernel for Hopper" if sparse_latent.takes_hopper(*rows) else ""
        if part == "lists" and stored is FP8 and not self.decoding and hopper.TESTED_SCORES:
            self.name += ", scores by the kernel for Hopper"

    def seconds(self, constants: Constants) -> float | str:
        """Return the seconds of a call, or the reason that there are none."""
        with mock.patch.multiple(self.module, **constants) if constants else mock.patch.dict({}):
            try:
                if not near(self.function(*self.sets[0]), self.expected):
                    return "other results"
                return self.clock.time(calls_of(self.function, self.sets, self.clock)).median
            except (RuntimeError, TritonError) as error:
                return str(error).splitlines()[0]

    def search(self) -> tuple[dict[str, float | str], Constants, float]:
        """Return constants → seconds, then the fastest constants and their seconds."""
        times: dict[str, float | str] = {AS_IT_IS: self.seconds({})}
        best, least = dict[str, Any](), times[AS_IT_IS]
        assert isinstance(least, float), least
        for constant, values in candidates(self.part, self.heads, self.decoding).items():
            found = best
            for value in values:
                tried = best | {constant: value}
                label = ", ".join(f"{key} {number}" for key, number in tried.items())
                time = times[label] = self.seconds(tried)
                if isinstance(time, float) and time < 0.99 * least:
                    least, found = time, tried
            best = found
        return times, best, least


def shown(time: float | str) -> str:
    return f"{time * 1e6:10.1f} us" if isinstance(time, float) else f"{'-':>13}  {time}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--chunk", type=int, default=2048, help="new tokens of a prompt's last chunk; 0: no prompt")
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 16])
    kinds = ("bfloat16", "float8_e4m3fn")
    parser.add_argument("--cache", choices=kinds, default="bfloat16", help="of latent rows")
    parser.add_argument("--index-caches", choices=kinds, nargs="+", default=["float8_e4m3fn"], help="of index keys")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--as-it-is", action="store_true", help="no candidates")
    parser.add_argument("--hopper-lists", action="store_true", help="attention by the kernel for Hopper")
    parser.add_argument("--hopper-scores", action="store_true", help="scores by the kernel for Hopper")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    hopper.TESTED_LISTS = (hopper._version(),) if given.hopper_lists else ()
    hopper.TESTED_SCORES = (hopper._version(),) if given.hopper_scores else ()
    clock = Clock(torch.device(given.device))
    rates, found, total = Rates(clock), [], dict[tuple[int, str], dict[str, float]]()
    print(f"copy {rates.moved / 1e12:.2f} TB/s, product {rates.summed / 1e12:.0f} TFLOP/s", flush=True)
    sizes = [(requests, 1, context) for context in given.contexts for requests in given.requests]
    sizes += [(1, min(given.chunk, given.contexts[0]), given.contexts[0])] if given.chunk else []
    for part in given.parts:
        for requests, new, context in sizes:
            if part == "dense" and new > 1:
                continue
            listing = part == "lists"
            cases = itertools.product(
                given.heads[:1] if listing else given.heads, given.index_caches if listing else [given.cache]
            )
            for heads, kind in cases:
                stored = getattr(torch, kind)
                batch = Batch(clock.device, requests, new, context)
                trial = Trial(clock, part, batch, heads, stored)
                floors = trial.work.bytes_moved / rates.moved, trial.work.operations / rates.summed
                searching = part != "dense" and not given.as_it_is
                times, best, least = trial.search() if searching else ({AS_IT_IS: trial.seconds({})}, {}, 0.0)
                print(f"{trial.name}: floors: bytes {floors[0] * 1e6:.1f} us, sums {floors[1] * 1e6:.1f} us")
                for label, time in times.items():
                    print(f"  {shown(time)}  {label}")
                if best:
                    print(f"  fastest {shown(least).strip()}: {best}")
                print(end="", flush=True)
                as_it_is = times[AS_IT_IS]
                if isinstance(as_it_is, float) and new == 1:
                    for count in given.heads if listing else [heads]:
                        total.setdefault((count, str(batch)), {})[part] = as_it_is
                found.append({"case": trial.name, "floors": floors, "seconds": times, "fastest": best})
                del trial
                if given.json:
                    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
                    machine |= {"triton": triton.__version__, "copy": f"{rates.moved:.3g}"}
                    write(given.json, {"machine": machine, "cases": found})
    for (heads, name), parts in total.items():
        if parts.keys() == PARTS.keys():
            listed = parts["lists"] + parts["attention"]
            print(f"{heads} heads, {name}: dense {shown(parts['dense']).strip()}, listed {shown(listed).strip()}, "
                  f"{parts['dense'] / listed:.2f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
