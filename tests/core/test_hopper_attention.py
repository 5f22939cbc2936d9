"""The Hopper kernel's own logic on the CPU: what it loads, when, in which order, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fl_dispatch.backends.triton.impl import attention, hopper, mla_prefill
from fl_dispatch.errors import NotSupported
from gluon_on_cpu import Machine

FILES = Path(hopper.__file__).parent
NAMES = ("schedule", "producer", "consumer", "kernel")
PAGED = ((200, 333), (1, 40), (128, 128), (0, 100), (130, 700), (64, 257), (0, 0))
FLAT = ((200, 333), (300, 100), (1, 7), (129, 520), (0, 5), (130, 130))
SetUp = Callable[..., None]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """The kernel runs on the CPU, with so many programs."""

    def set_up(programs: int, **options: Any) -> None:
        machine = Machine(programs)
        kernel = machine.load(FILES, NAMES)["attention"]

        def launch(grid: Any, tensors: Any, numbers: Any, *, sizes: Any, warps: int) -> None:
            assert grid == (programs, 1, 1)
            machine.run(kernel, *tensors, *sizes, *numbers)

        monkeypatch.setattr(hopper, "_launcher", lambda: launch)
        monkeypatch.setattr(hopper, "_processors", lambda device: programs)
        monkeypatch.setattr(hopper, "why_unavailable", lambda device: "")
        monkeypatch.setattr(hopper, "OPTIONS", hopper.Options(**options))

    return set_up


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Of one request: ``[tokens, heads, dim]`` and ``[heads, tokens]``; rows that see nothing are 0 and -inf."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    tokens, keys = scores.shape[1:]
    if causal:
        hidden = torch.arange(keys)[None, :] > torch.arange(tokens)[:, None] + keys - tokens
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value.float()), scores.logsumexp(-1)


class Batch:
    """Requests over a paged cache, whose unused slots are NaN."""

    def __init__(self, block_size: int = 16, dim: int = 64) -> None:
        torch.manual_seed(0)
        pages = [-(-length // block_size) for _, length in PAGED]
        order = torch.randperm(sum(pages))
        self.table = torch.full((len(PAGED), max(pages) + 1), -1, dtype=torch.int32)
        cache = numbers(sum(pages) + 1, 2, block_size, 2 * dim).transpose(1, 2)
        unused = torch.ones(len(cache), block_size, dtype=torch.bool)
        self.where = []
        for row, mine, (_, length) in zip(self.table, torch.split(order, pages), PAGED, strict=True):
            row[: len(mine)] = mine.int()
            position = torch.arange(length)
            self.where.append((mine[position // block_size], position % block_size))
            unused[self.where[-1]] = False
        cache.masked_fill_(unused[:, :, None, None], float("nan"))
        self.key, self.value = cache[..., :dim], cache[..., dim:]
        self.starts = starts([new for new, _ in PAGED])
        self.lengths = torch.tensor([length for _, length in PAGED], dtype=torch.int32)
        self.query = numbers(int(self.starts[-1]), 4, dim)
        self.out = torch.full_like(self.query, -7.0)
        self.scale = dim**-0.5

    def arguments(self, causal: bool = True) -> tuple[Any, ...]:
        lengths = (max(new for new, _ in PAGED), max(length for _, length in PAGED))
        caches = (self.key, self.value, self.table)
        return (self.query, *caches, self.starts, self.lengths, *lengths, self.scale, self.out, causal)

    def check(self, causal: bool = True, least_new: int = 0) -> None:
        for index, (new, _) in enumerate(PAGED):
            mine, there = slice(int(self.starts[index]), int(self.starts[index + 1])), self.where[index]
            if new < least_new:
                assert (self.out[mine] == -7.0).all()
            elif new:
                want, _ = expected(self.query[mine], self.key[there], self.value[there], self.scale, causal)
                torch.testing.assert_close(self.out[mine].float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("causal", "block_size", "dim", "programs", "options"),
    [
        (True, 16, 64, 3, {}),
        (False, 16, 64, 5, {}),
        (True, 1, 64, 2, {}),
        (True, 48, 128, 4, {"ordered": True}),
        (True, 16, 64, 64, {"stages": 3}),
        (True, 16, 64, 3, {"late": False}),
    ],
)
def test_paged_keys(
    on_cpu: SetUp, causal: bool, block_size: int, dim: int, programs: int, options: dict[str, Any]
) -> None:
    on_cpu(programs, **options)
    batch = Batch(block_size, dim)
    assert attention.paged_attention(*batch.arguments(causal)) is batch.out
    batch.check(causal)


def test_short_requests_are_left_to_their_own_route(on_cpu: SetUp) -> None:
    on_cpu(3)
    batch = Batch()
    query, key, value, table, first, lengths, *_ = batch.arguments()
    hopper.attend_paged(
        query, key, value, table, first, lengths, batch.scale, batch.out, causal=True, least_new=65, narrow=False
    )
    batch.check(least_new=65)


@pytest.mark.parametrize(("causal", "late", "programs"), [(True, True, 3), (False, True, 7), (True, False, 4)])
def test_keys_in_a_row(on_cpu: SetUp, causal: bool, late: bool, programs: int) -> None:
    on_cpu(programs, late=late)
    torch.manual_seed(1)
    heads, dim, dim_v = 2, 192, 128
    query_starts, key_starts = starts([new for new, _ in FLAT]), starts([length for _, length in FLAT])
    query, key = numbers(int(query_starts[-1]), heads, dim), numbers(int(key_starts[-1]), heads, dim)
    value = numbers(int(key_starts[-1]), heads, 2 * dim_v)[..., dim_v:]
    scale = dim**-0.5
    out, lse = mla_prefill.mla_prefill(query, key, value, query_starts, key_starts, 300, 520, scale, None, causal)
    for index, (new, _) in enumerate(FLAT):
        mine = slice(int(query_starts[index]), int(query_starts[index + 1]))
        theirs = slice(int(key_starts[index]), int(key_starts[index + 1]))
        if new:
            want, total = expected(query[mine], key[theirs], value[theirs], scale, causal)
            torch.testing.assert_close(out[mine].float(), want, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(lse[:, mine], total, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("more", [{"sliding_window": 9}, {"softcap": 2.0}, {"sinks": torch.zeros(4)}])
def test_what_the_kernel_lacks_takes_the_plain_one(on_cpu: SetUp, more: dict[str, Any]) -> None:
    on_cpu(3)
    with pytest.raises(NotSupported, match="on the CPU"):  # which needs a GPU
        attention.paged_attention(*Batch().arguments(), **more)


def test_it_runs_for_aligned_rows_of_half_types_alone(on_cpu: SetUp) -> None:
    on_cpu(3)
    good = numbers(8, 2, 128)
    assert hopper.fits(good, good, good)
    odd = numbers(8, 2, 136)[..., :128]
    other = numbers(8, 2, 96)
    shifted = numbers(8 * 2 * 128 + 1)[1:].view(8, 2, 128)
    strided = numbers(8, 2, 256)[..., ::2]
    for bad in (odd, shifted, strided, good.float(), good.half()):
        assert not hopper.fits(good, bad, good)
        assert not hopper.fits(bad, good, good)
    assert not hopper.fits(other, other, good)
    assert not hopper.fits(good, good, other)
    assert not hopper.fits(good.float(), good.float(), good.float())


def test_a_device_that_is_not_hopper_takes_the_plain_kernel() -> None:
    tensor = numbers(4, 2, 128)
    assert hopper.why_unavailable(tensor.device)
    assert not hopper.fits(tensor, tensor, tensor)
