"""The Hopper kernel for decoding of latent attention on the CPU: what it loads, when, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fl_dispatch.backends.triton.impl import hopper
from fl_dispatch.backends.triton.impl.attention import latent_decode, paged
from fl_dispatch.errors import NotSupported
from gluon_on_cpu import Machine, Pointer

FILES = Path(hopper.__file__).parent
SHARED = ("pipeline", "requests", "rows", "products", "softmax")
PRODUCER = (*SHARED, "latent_decode/work", "latent_decode/producer")
NAMES = (*PRODUCER, "latent_decode/consumer", "latent_decode/kernel")
RANK, WIDTH = 512, 576
SetUp = Callable[..., None]


def combine(
    grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], *, sizes: Any, warps: int
) -> None:
    """The plain kernel that adds up parts: those with keys count, and nothing else may be read."""
    starts, lengths, out, _, partial, statistics = tensors
    heads, keys, (splits, most_new) = numbers[2], numbers[-2], sizes
    for request in range(grid[1]):
        begin, end, length = int(starts[request]), int(starts[request + 1]), int(lengths[request])
        share = -(-length // splits)
        share = -(-share // keys) * keys
        used = [split for split in range(splits) if split * share < length]
        if not used:
            continue
        for token in range(end - begin):
            first = (request * most_new + token) * heads * splits
            parts = partial[first * RANK :][: heads * splits * RANK].view(heads, splits, RANK)[:, used]
            tops, belows = statistics[first * 2 :][: heads * splits * 2].view(heads, splits, 2)[:, used].unbind(-1)
            factors = torch.exp2(tops - tops.amax(1, keepdim=True))
            total = (belows * factors).sum(1, keepdim=True)
            out[begin + token] = ((parts * factors[..., None]).sum(1) / total).to(out.dtype)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """The kernel runs on the CPU, as on a device with so many processors."""

    def set_up(processors: int, seed: int = 0) -> None:
        machine = Machine(1, seed)
        names = machine.load(FILES, NAMES)
        kernel = names["latent_attention"]
        assert (names["ROWS"], names["KEYS"]) == (hopper.LATENT_ROWS, hopper.LATENT_KEYS)

        def launch(grid: Any, tensors: Any, numbers: Any, *, sizes: Any, warps: int) -> None:
            machine.programs = grid[0]
            machine.run(kernel, *tensors, *sizes, *numbers, more=grid[1:])

        monkeypatch.setattr(hopper, "_launcher", {hopper.LATENT: launch}.get)
        monkeypatch.setattr(hopper, "processors", lambda device: processors)
        monkeypatch.setattr(hopper, "why_unavailable", lambda device: "")
        monkeypatch.setattr(latent_decode, "_launch_combine", combine)
        empty = torch.Tensor.new_empty
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **rest: empty(*args, **rest).fill_(float("nan")))
        paged._splits.cache_clear()

    return set_up


class Batch:
    """Requests, each with new tokens and keys, over a paged latent cache, whose unused slots are NaN."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        heads: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        self.requests = requests
        pages = [-(-length // block_size) for _, length in requests]
        self.table = torch.full((len(requests), max(pages) + 1), -1, dtype=torch.int32)
        self.cache = torch.randn(sum(pages) + 1, block_size, WIDTH).to(dtype)
        unused = torch.ones(self.cache.shape[:2], dtype=torch.bool)
        self.where = []
        order = torch.randperm(sum(pages)).split(pages)
        for row, mine, (_, length) in zip(self.table, order, requests, strict=True):
            row[: len(mine)] = mine.int()
            position = torch.arange(length)
            self.where.append((mine[position // block_size], position % block_size))
            unused[self.where[-1]] = False
        self.cache[unused] = float("nan")
        self.starts = torch.tensor([0, *accumulate(new for new, _ in requests)], dtype=torch.int32)
        self.lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
        self.query = torch.randn(int(self.starts[-1]), heads, WIDTH).to(dtype)
        self.out = self.query.new_full((len(self.query), heads, RANK), -7.0)
        self.scale = 3 * WIDTH**-0.5

    def arguments(self, causal: bool = True) -> tuple[Any, ...]:
        most = [max(each) for each in zip(*self.requests, strict=True)]
        rest = (self.starts, self.lengths, *most, self.scale, RANK, self.out, causal)
        return self.query, self.cache, self.table, *rest

    def check(self, causal: bool = True) -> None:
        for index, (new, length) in enumerate(self.requests):
            mine = slice(int(self.starts[index]), int(self.starts[index + 1]))
            keys = self.cache[self.where[index]].float()
            scores = torch.einsum("qhd,kd->hqk", self.query[mine].float(), keys) * self.scale
            seen = torch.ones(new, length, dtype=torch.bool)
            if causal:
                seen = torch.arange(length)[None, :] <= torch.arange(new)[:, None] + length - new
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            want = torch.einsum("hqk,kd->qhd", weights, keys[:, :RANK])
            some = seen.any(1)
            torch.testing.assert_close(self.out[mine][some].float(), want[some], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("requests", "heads", "causal", "block_size", "dtype", "processors"),
    [
        ([(1, 333), (1, 1), (1, 64), (1, 130)], 128, True, 16, torch.bfloat16, 1),
        ([(1, 700), (1, 65)], 64, True, 64, torch.float16, 1),
        ([(1, 700), (1, 65), (1, 200)], 128, True, 16, torch.bfloat16, 24),  # 4 splits
        ([(2, 300), (4, 9), (1, 128), (3, 259)], 96, True, 1, torch.bfloat16, 1),  # tiles of rows of two tokens
        ([(3, 257), (1, 40), (2, 515)], 96, True, 48, torch.float16, 90),  # parts that some rows see nothing of
        ([(3, 260), (1, 2), (2, 130), (1, 67)], 96, False, 16, torch.bfloat16, 1),
        ([(3, 260), (1, 2), (2, 130), (1, 67)], 96, False, 16, torch.bfloat16, 30),
        ([(65, 67), (5, 700)], 16, True, 16, torch.bfloat16, 1),  # several tokens' masks in a tile of rows
    ],
)
def test_latent_keys(
    on_cpu: SetUp,
    requests: list[tuple[int, int]],
    heads: int,
    causal: bool,
    block_size: int,
    dtype: torch.dtype,
    processors: int,
) -> None:
    on_cpu(processors)
    batch = Batch(requests, heads, block_size, dtype)
    assert latent_decode.mla_decode(*batch.arguments(causal)) is batch.out
    batch.check(causal)


def test_a_query_in_two_parts(on_cpu: SetUp) -> None:
    """The rotary part behind one that is not absorbed, as vLLM has it."""
    on_cpu(1)
    batch = Batch([(2, 300), (1, 65)], 96)
    rope = torch.cat((batch.query[..., :128], batch.query[..., RANK:]), dim=-1)[..., 128:]
    _query, *rest = batch.arguments()
    latent_decode.mla_decode(batch.query[..., :RANK].contiguous(), *rest, None, rope)
    batch.check()
    batch.out.fill_(-7.0)
    latent_decode.mla_decode(batch.query[..., :RANK].contiguous(), *rest, None, 2 * rope)
    with pytest.raises(AssertionError):
        batch.check()


@pytest.mark.parametrize(("processors", "splits"), [(1, 1), (20, 2)])
def test_requests_without_tokens_or_keys(on_cpu: SetUp, processors: int, splits: int) -> None:
    on_cpu(processors)
    batch = Batch([(0, 0), (1, 200), (0, 70), (2, 129), (0, 0)], 64)
    assert latent_decode._splits(processors, 5 * 2, 2) == splits  # 2 tiles of rows for each request
    latent_decode.mla_decode(*batch.arguments())
    batch.check()


def test_rows_that_see_nothing_do_not_spoil_others(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(3, 1), (1, 0), (1, 100)], 64)
    latent_decode.mla_decode(*batch.arguments())
    batch.check()


def test_rows_that_no_request_covers_stay(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(1, 100), (1, 70)], 96)
    batch.starts[2] = 1
    latent_decode.mla_decode(*batch.arguments())
    assert (batch.out[1] == -7.0).all()


@pytest.mark.parametrize("seed", range(4))
def test_whoever_dawdles(on_cpu: SetUp, seed: int) -> None:
    on_cpu(1, seed)
    batch = Batch([(1, 600)], 64)
    latent_decode.mla_decode(*batch.arguments())
    batch.check()


def test_strides_beyond_32_bits() -> None:
    """Blocks that lie so far from each other that their products with a page's number need 64 bits."""
    machine = Machine(1)
    names = machine.load(FILES, PRODUCER)
    asked: list[Tensor] = []
    names["copy_rows"] = lambda buffer, source, rows, *rest: asked.append(rows)
    names["mbarrier"].wait = names["mbarrier"].arrive = lambda *args, **rest: None
    machine.local.copies, machine.local.groups, machine.local.arrived = [], [], []
    batch = Batch([(1, 128)], 64)
    batch.table[0, :8] = torch.arange(1000, 1008)
    table, begins, lengths = [Pointer.of(each) for each in (batch.table, batch.starts, batch.lengths)]
    bufs, bars = (machine._allocate(dtype, [2, 1], None) for dtype in (torch.bfloat16, torch.int64))
    ring = names["Ring"](bufs, bufs, bars, bars, 0, 2)
    cache = names["LatentCache"](None, 1 << 24, 576, table, batch.table.shape[1])
    config = SimpleNamespace(heads=64, block_size=16, causal=True, divided=False, listed=False, persistent=False)
    names["_load_queries"] = lambda *args: None
    items = names["Items"](begins, lengths, 1, 1, 1)
    pipeline = SimpleNamespace(left=ring, right=ring, q_free=None)
    for which, first in ((1, 0), (0, 1)):
        asked.clear()
        names["produce"](config, pipeline, items, None, None, cache, which)
        position = torch.arange(64) + 64 * first
        want = (1000 + position // 16) * (1 << 24) + position % 16 * 576
        assert len(asked) == 3
        for rows in asked:
            assert torch.equal(rows, want)


@pytest.mark.parametrize(("requests", "splits"), [(128, 1), (8, 8), (33, 2), (1, 32)])
def test_a_processor_has_one_program(
    on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch, requests: int, splits: int
) -> None:
    on_cpu(132)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(hopper, "decode_latent", lambda tensors, numbers, **rest: asked.append(rest))
    monkeypatch.setattr(latent_decode, "_launch_combine", lambda *args, **rest: None)
    batch = Batch([(1, 1)] * requests, 128)
    arguments = list(batch.arguments())
    arguments[6] = 4096
    latent_decode.mla_decode(*arguments)
    assert (asked[0]["tiles"], asked[0]["splits"]) == (2, splits)


def plain(batch: Batch, **changes: Any) -> None:
    """It takes the plain kernel, which needs a GPU."""
    arguments = list(batch.arguments())
    for index, value in changes.values():
        arguments[index] = value
    with pytest.raises(NotSupported, match="on the CPU"):
        latent_decode.mla_decode(*arguments)


def test_few_rows_take_the_plain_kernel(on_cpu: SetUp) -> None:
    on_cpu(1)
    plain(Batch([(1, 70)], 63))
    plain(Batch([(3, 70)], 16))
    batch = Batch([(1, 70)], 64)
    latent_decode.mla_decode(*batch.arguments())
    batch.check()


def test_other_tensors_take_the_plain_kernel(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(1, 70)], 64)
    cache = batch.cache
    wide = torch.zeros(*cache.shape[:2], WIDTH + 8, dtype=cache.dtype)[..., :WIDTH]
    shifted = torch.zeros(cache.numel() + 1, dtype=cache.dtype)[1:].view(cache.shape)
    for bad in (wide, shifted, cache.half(), cache.float()):
        plain(batch, cache=(1, bad))
    plain(batch, query=(0, batch.query.float()), cache=(1, cache.float()))
    plain(batch, rank=(8, 448), out=(9, batch.out[..., :448].contiguous()))
    narrow = (0, batch.query[..., :544].contiguous()), (1, cache[..., :544].contiguous())
    plain(batch, query=narrow[0], cache=narrow[1])


def test_another_device_takes_the_plain_kernel() -> None:
    batch = Batch([(1, 70)], 64)
    assert not hopper.fits_latent(batch.query[..., :RANK], batch.query[..., RANK:], batch.cache)
    plain(batch)


def test_parts_of_a_query_that_do_not_fit_each_other_are_declined(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(1, 70)], 64)
    whole, *rest = batch.arguments()
    query, rope = whole[..., :RANK], whole[..., RANK:]
    for wrong in ((query, rope.float()), (whole, rope)):
        with pytest.raises(NotSupported, match="parts of the query"):
            latent_decode.mla_decode(wrong[0], *rest, None, wrong[1])
    latent_decode.mla_decode(query, *rest, None, rope)
    batch.check()
