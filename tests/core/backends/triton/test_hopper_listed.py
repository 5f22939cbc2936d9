"""The Hopper kernel for latent attention over listed rows, on the CPU: what it makes of lists, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_hopper_latent import FILES, NAMES, RANK, WIDTH

from fl_dispatch.backends.triton.impl import hopper
from fl_dispatch.backends.triton.impl.attention import paged, sparse_latent
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops import OPERATORS
from gluon_on_cpu import Machine

UNTOUCHED = -7.0
SetUp = Callable[..., None]


def add_up(
    grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], *, sizes: Any, warps: int
) -> None:
    """The plain kernel that adds up parts; it reads those of all covered queries."""
    starts, out, partial, statistics = tensors
    heads, (_, splits) = grid[0], sizes
    for token in range(int(starts[-1])):
        first = token * heads * splits
        parts = partial[first * RANK :][: heads * splits * RANK].view(heads, splits, RANK)
        tops, belows = statistics[first * 2 :][: heads * splits * 2].view(heads, splits, 2).unbind(-1)
        factors = torch.exp2(tops - tops.amax(1, keepdim=True))
        total = (belows * factors).sum(1, keepdim=True)
        out[token] = ((parts * factors[..., None]).sum(1) / torch.where(total > 0, total, 1.0)).to(out.dtype)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """The kernel runs on the CPU, as on a device with so many processors, and is taken for tested."""

    def set_up(processors: int, seed: int = 0) -> None:
        machine = Machine(1, seed)
        kernel = machine.load(FILES, (*NAMES, "../attention/requests", "latent_decode/listed"))["listed_attention"]

        def launch(grid: Any, tensors: Any, numbers: Any, *, sizes: Any, warps: int) -> None:
            machine.programs = grid[0]
            machine.run(kernel, *tensors, *sizes, *numbers, more=grid[1:])

        monkeypatch.setattr(hopper, "_launcher", {hopper.LISTED: launch}.get)
        monkeypatch.setattr(hopper, "TESTED_LISTS", (hopper._version(),))
        monkeypatch.setattr(hopper, "processors", lambda device: processors)
        monkeypatch.setattr(hopper, "why_unavailable", lambda device: "")
        monkeypatch.setattr(sparse_latent, "_slots", lambda device: processors)
        monkeypatch.setattr(sparse_latent, "_launch_sum", add_up)
        empty = torch.Tensor.new_empty
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **rest: empty(*args, **rest).fill_(float("nan")))
        paged._splits.cache_clear()

    return set_up


class Batch:
    """Requests, each with its tokens' numbers of listed rows, over a paged cache; what nobody lists is NaN."""

    def __init__(
        self,
        requests: Sequence[Sequence[int]],
        heads: int = 128,
        block_size: int = 16,
        width: int = 200,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        blocks = -(-2 * width // block_size)
        counts = [count for request in requests for count in request]
        self.starts = torch.tensor([0, *accumulate(map(len, requests))], dtype=torch.int32)
        self.table = torch.randperm(len(requests) * blocks).view(len(requests), blocks).int()
        self.positions = torch.full((len(counts), width), -1, dtype=torch.int32)
        cache = torch.full((len(requests) * blocks * block_size, WIDTH), float("nan"))
        for token, count in enumerate(counts):
            self.positions[token, :count] = torch.randperm(2 * width)[:count].sort().values.int()
            request = int((self.starts[1:] <= token).sum())
            position = self.positions[token, :count].long()
            slots = self.table[request, position // block_size].long() * block_size + position % block_size
            cache[slots] = torch.randn(count, WIDTH)
        self.cache = cache.view(-1, block_size, WIDTH).to(dtype)
        self.query = torch.randn(len(counts), heads, WIDTH).to(dtype)
        self.out = self.query.new_full((len(counts), heads, RANK), UNTOUCHED)
        self.most = max(map(len, requests))

    def arguments(self) -> tuple[Any, ...]:
        rest = (self.positions, self.table, self.starts, self.most, 3 * WIDTH**-0.5, RANK, self.out)
        return self.query, self.cache, *rest

    def check(self) -> None:
        *given, _ = self.arguments()
        wide = (self.query.float(), self.cache.float(), *given[2:], torch.full(self.out.shape, UNTOUCHED))
        want = OPERATORS["mla_sparse"].reference(*wide)
        torch.testing.assert_close(self.out.float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("requests", "heads", "block_size", "dtype", "processors"),
    [
        ([(200, 1, 64), (65, 130)], 128, 16, torch.bfloat16, 1),
        ([(200, 3), (128,), (63, 64)], 64, 64, torch.float16, 1),
        ([(200, 3), (128,)], 96, 48, torch.bfloat16, 1),  # the last tile of heads is not full
        ([(200,), (3, 130)], 128, 1, torch.bfloat16, 24),  # lists are divided, and some parts are empty
        ([(0, 200), (), (7,)], 64, 16, torch.bfloat16, 1),  # an empty list gives zeros, and a request has no token
        ([(0, 200), (), (7,)], 64, 16, torch.float16, 30),
    ],
)
def test_listed_rows(
    on_cpu: SetUp,
    requests: list[tuple[int, ...]],
    heads: int,
    block_size: int,
    dtype: torch.dtype,
    processors: int,
) -> None:
    on_cpu(processors)
    width = 256 if processors > 1 else 200
    batch = Batch(requests, heads, block_size, width, dtype)
    if processors > 1:
        assert sparse_latent._splits(processors, len(batch.query) * -(-heads // 64), 2) == 2
    assert sparse_latent.mla_sparse(*batch.arguments()) is batch.out
    batch.check()


def test_another_list_is_another_result(on_cpu: SetUp) -> None:
    """A row that is missed, and one of another request, are seen."""
    on_cpu(1)
    for change in ("miss", "move"):
        batch = Batch([(200, 65), (64, 90)], 64)
        wrong = list(batch.arguments())
        if change == "miss":
            wrong[2] = batch.positions.clone()
            wrong[2][1, 64] = -1
        else:
            wrong[3] = batch.table[[0, 0]]
            wrong[1] = batch.cache.nan_to_num()
        sparse_latent.mla_sparse(*wrong)
        with pytest.raises(AssertionError):
            batch.check()


def test_a_query_in_two_parts(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(130, 65)], 96)
    rope = torch.cat((batch.query[..., :128], batch.query[..., RANK:]), dim=-1)[..., 128:]
    _query, *rest = batch.arguments()
    sparse_latent.mla_sparse(batch.query[..., :RANK].contiguous(), *rest, None, rope)
    batch.check()


def test_rows_that_no_request_covers_stay(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(100, 70)], 96)
    batch.starts[1] = 1
    batch.positions[1] = 1 << 30
    sparse_latent.mla_sparse(*batch.arguments())
    assert (batch.out[1] == UNTOUCHED).all()
    assert (batch.out[0] != UNTOUCHED).any()


@pytest.mark.parametrize("seed", range(3))
def test_whoever_dawdles(on_cpu: SetUp, seed: int) -> None:
    on_cpu(1, seed)
    batch = Batch([(600, 600, 600)], 64, width=600)
    sparse_latent.mla_sparse(*batch.arguments())
    batch.check()


def plain(batch: Batch, arguments: Sequence[Any] | None = None) -> None:
    """It takes the plain kernel, which needs a GPU."""
    with pytest.raises(NotSupported, match="on the CPU"):
        sparse_latent.mla_sparse(*(arguments or batch.arguments()))


def test_few_heads_and_few_queries_take_the_plain_kernel(on_cpu: SetUp) -> None:
    on_cpu(1)
    plain(Batch([(70, 70, 70)], 63))
    plain(Batch([(70,)], 128))
    plain(Batch([(70, 70)], 64))


def test_a_cache_of_another_type_takes_the_plain_kernel(on_cpu: SetUp) -> None:
    on_cpu(1)
    batch = Batch([(70, 70)], 128)
    query, cache, *rest = batch.arguments()
    plain(batch, (query, cache.to(torch.float8_e4m3fn), *rest, 0.5))
    plain(batch, (query.float(), cache.float(), *rest[:-1], batch.out.float()))


def test_an_untested_version_takes_the_plain_kernel(on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(1)
    monkeypatch.setattr(hopper, "TESTED_LISTS", ())
    plain(Batch([(70, 70)], 128))
