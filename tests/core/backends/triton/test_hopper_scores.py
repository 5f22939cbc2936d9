"""The Hopper kernel for index scores on the CPU: what it loads, when, and what it makes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gluon_on_cpu
from fl_dispatch.backends.triton.impl import hopper
from fl_dispatch.backends.triton.impl.attention import index_topk
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import FP8
from gluon_on_cpu import Machine

FILES = Path(hopper.__file__).parent
NAMES = ("pipeline", "rows", "products", "scores")
DIM, TOPK = 128, 4
Kernel = dict[str, Any]
SetUp = Callable[..., Kernel]


def rounded(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries in fp8; the tests give queries that are."""
    return query.to(FP8), weights.contiguous()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """The kernel runs on the CPU, and is taken for tested; returns its names, which a test may replace."""

    def set_up(constants: tuple[int, int, int, int] = (3, 2, 8, 3), seed: int = 0) -> Kernel:
        machine = Machine(1, seed)
        names = machine.load(FILES, NAMES)
        assert names["ROWS"] == hopper.SCORE_ROWS

        def launch(grid: Any, tensors: Any, numbers: Any, *, sizes: Any, warps: int) -> None:
            machine.programs = grid[0]
            machine.run(names["index_scores"], *tensors, *sizes, *numbers, more=grid[1:])

        monkeypatch.setattr(hopper, "_launcher", {hopper.SCORES: launch}.get)
        monkeypatch.setattr(hopper, "TESTED_SCORES", (hopper._version(),))
        monkeypatch.setattr(hopper, "why_unavailable", lambda device: "")
        monkeypatch.setattr(index_topk, "quantized_queries", rounded)
        monkeypatch.setattr(index_topk, "SCORING_HOPPER", constants)
        monkeypatch.setattr(index_topk, "MANY_QUERIES", 2)
        return names

    return set_up


class Batch:
    """Requests, each with new tokens and all its tokens, over a paged cache, whose unused slots are NaN."""

    def __init__(self, requests: Sequence[tuple[int, int]], heads: int = 64, block_size: int = 16) -> None:
        torch.manual_seed(0)
        self.requests = requests
        pages = [-(-length // block_size) for _, length in requests]
        self.table = torch.full((len(requests), max(pages) + 1), -1, dtype=torch.int32)
        keys = torch.randn(sum(pages), block_size, DIM)
        self.scales = torch.rand(sum(pages), block_size, 1) + 0.5
        unused = torch.ones(keys.shape[:2], dtype=torch.bool)
        self.where = []
        for row, mine, (_, length) in zip(self.table, torch.randperm(sum(pages)).split(pages), requests, strict=True):
            row[: len(mine)] = mine.int()
            position = torch.arange(length)
            self.where.append((mine[position // block_size], position % block_size))
            unused[self.where[-1]] = False
        keys[unused] = self.scales[unused] = float("nan")
        self.keys = keys.to(FP8)
        self.starts = torch.tensor([0, *accumulate(new for new, _ in requests)], dtype=torch.int32)
        self.lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
        self.query = torch.randn(int(self.starts[-1]), heads, DIM).to(FP8).float()
        self.weights = torch.randn(len(self.query), heads)

    def arguments(self) -> tuple[Any, ...]:
        most = [max(each) for each in zip(*self.requests, strict=True)]
        rest = (self.starts, self.lengths, *most, TOPK, None, self.scales)
        return self.query, self.weights, self.keys, self.table, *rest

    def scores(self, monkeypatch: pytest.MonkeyPatch) -> Tensor:
        """Scores of all queries, NaN where none were written."""
        found: dict[int, Tensor] = {}
        empty = torch.Tensor.new_empty
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", lambda *args, **rest: empty(*args, **rest).fill_(torch.nan))
            patch.setattr(index_topk, "_best", lambda scores, *rest: found.update({rest[3]: scores}))
            out = torch.empty(len(self.query), TOPK, dtype=torch.int32)
            *given, _, scales = self.arguments()
            index_topk.index_topk(*given, out, scales)
        return torch.cat([found[first] for first in sorted(found)])

    def check(self, scores: Tensor) -> None:
        """Compare with a loop over queries and heads in float64."""
        want = torch.full(scores.shape, torch.nan, dtype=torch.float64)
        for request, (new, length) in enumerate(self.requests):
            keys = self.keys[self.where[request]].double()
            units = self.scales[self.where[request]].double()[:, 0]
            for row in range(new):
                token, seen = int(self.starts[request]) + row, length - new + row + 1
                for query, weight in zip(self.query[token].double(), self.weights[token].double(), strict=True):
                    more = (keys[:seen] @ query).clamp(min=0) * weight * units[:seen]
                    want[token, :seen] = want[token, :seen].nan_to_num() + more
        torch.testing.assert_close(scores.double(), want, rtol=1e-4, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("requests", "heads", "block_size", "constants"),
    [
        ([(5, 400), (20, 20), (1, 700), (9, 130)], 64, 16, (3, 2, 8, 3)),
        ([(5, 400), (20, 20), (1, 700), (9, 130)], 64, 64, (4, 1, 8, 8)),
        ([(30, 385), (3, 258)], 64, 1, (2, 2, 16, 5)),
        ([(30, 385), (3, 258)], 32, 48, (3, 2, 16, 8)),
        ([(13, 257), (2, 2)], 32, 64, (4, 1, 4, 2)),
    ],
)
def test_scores(
    on_cpu: SetUp,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[int, int]],
    heads: int,
    block_size: int,
    constants: tuple[int, int, int, int],
) -> None:
    on_cpu(constants)
    batch = Batch(requests, heads, block_size)
    batch.check(batch.scores(monkeypatch))


@pytest.mark.parametrize("most", [1024 * 7, 1024 * 16])
def test_some_queries_at_a_time(on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Queries in chunks, which begin and end in the middle of requests."""
    on_cpu()
    monkeypatch.setattr(index_topk, "MOST_SCORES", most)
    batch = Batch([(11, 411), (12, 1000), (3, 9)])
    batch.check(batch.scores(monkeypatch))


def test_requests_without_tokens_and_rows_that_no_request_covers(
    on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu()
    batch = Batch([(4, 70), (0, 90), (6, 6), (0, 0), (3, 200)])
    batch.starts[-1] -= 1
    batch.requests = [*batch.requests[:-1], (2, 200)]
    scores = batch.scores(monkeypatch)
    assert scores[-1].isnan().all()
    batch.check(scores)


@pytest.mark.parametrize("constants", [(3, 2, 32, 3), (4, 1, 32, 3), (2, 2, 32, 8)])
@pytest.mark.parametrize("seed", range(2))
def test_whoever_dawdles(
    on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch, constants: tuple[int, int, int, int], seed: int
) -> None:
    on_cpu(constants, seed)
    batch = Batch([(32, 256)])
    batch.check(batch.scores(monkeypatch))


def publish_early(names: Kernel) -> None:
    """A query is published while its copies are under way."""
    publish = names["publish"]
    names["publish"] = lambda full, index, later: publish(full, index, later + 1)


def publish_without_a_fence(names: Kernel) -> None:
    names["fence_async_shared"] = lambda: None


def overwrite(names: Kernel) -> None:
    """A stage is filled again although a product reads it."""
    names["Ring"].acquire = lambda ring, i: None


def release_early(names: Kernel) -> None:
    """A stage is released when its last product begins."""
    start, ring, mine, rings = names["_start"], names["Ring"], threading.local(), list[Any]()
    release, alloc = ring.release, names["alloc"]
    ring.release = lambda self, stage: None

    def start_and_release(config: Any, tokens: Any, query: Any) -> Any:
        mine.started = getattr(mine, "started", 0) + 1
        product = start(config, tokens, query)
        if mine.started % config.tiles == 0:
            release(rings[-1], (mine.started // config.tiles - 1) % rings[-1].stages)
        return product

    def remember(*args: Any) -> Any:
        rings.append(alloc(*args))
        return rings[-1]

    names["alloc"], names["_start"] = remember, start_and_release


def write_one_more(names: Kernel) -> None:
    """A token that a query does not see gets a score."""
    load = names["_load_tile"]

    def shifted(*args: Any) -> Any:
        tokens = load(*args)
        return names["Tokens"](tokens.keys, tokens.unit, tokens.ahead - 1)

    names["_load_tile"] = shifted


def forget_the_largest(names: Kernel) -> None:
    """Negative products are added."""
    maximum = names["gl"].maximum
    names["gl"].maximum = lambda a, b: a if isinstance(a, Tensor) and a.dim() == 2 else maximum(a, b)


def weigh_with_others(names: Kernel) -> None:
    """Weights of another query."""
    weights, former = names["_weights"], list[Tensor]()

    def late(*args: Any) -> Tensor:
        former.append(weights(*args))
        return former[max(0, len(former) - 2)]

    names["_weights"] = late


@pytest.mark.parametrize(
    "fault",
    [
        publish_early, publish_without_a_fence, overwrite, release_early, write_one_more, forget_the_largest,
        weigh_with_others,
    ],
)  # fmt: skip
@pytest.mark.parametrize("constants", [(3, 2, 32, 5), (4, 1, 32, 5)])
def test_a_fault_is_seen(
    on_cpu: SetUp,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Kernel], None],
    constants: tuple[int, int, int, int],
) -> None:
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 1.0)
    fault(on_cpu(constants))
    batch = Batch([(32, 200)])
    with pytest.raises(AssertionError):
        batch.check(batch.scores(monkeypatch))


def plain(batch: Batch, **changes: Any) -> None:
    """It takes the plain kernel, which needs a GPU."""
    arguments = list(batch.arguments())
    for index, value in changes.values():
        arguments[index] = value
    with pytest.raises(NotSupported, match="on the CPU"):
        index_topk.index_topk(*arguments)


def test_what_takes_the_plain_kernel(on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu()
    batch = Batch([(4, 70)], 16)
    plain(batch)
    batch = Batch([(4, 70)])
    plain(batch, scales=(10, None), query=(0, batch.query.bfloat16()), keys=(2, batch.keys.bfloat16()))
    plain(batch, longest=(6, 1))
    wide = torch.zeros(*batch.keys.shape[:2], DIM + 8).to(FP8)
    plain(batch, keys=(2, wide[..., :DIM]))
    monkeypatch.setattr(hopper, "TESTED_SCORES", ())
    plain(batch)
