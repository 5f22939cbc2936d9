"""The Hopper kernel's own logic on the CPU: what it loads, when, in which order, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fl_dispatch.backends.triton.impl import hopper
from fl_dispatch.backends.triton.impl.attention import latent_prefill, paged
from fl_dispatch.devices import CUDA
from fl_dispatch.errors import NotSupported
from fl_dispatch.settings import reset_settings
from gluon_on_cpu import Machine, Pointer

FILES = Path(hopper.__file__).parent
SHARED = ("pipeline", "requests", "rows", "products", "softmax")
SCHEDULER = ("prefill/config", "prefill/scheduler")
NAMES = (*SHARED, *SCHEDULER, "prefill/producer", "prefill/consumer", "prefill/kernel", "prefill/bulk")
PAGED = ((200, 333), (1, 40), (128, 128), (0, 100), (130, 700), (64, 257), (0, 0))
FLAT = ((200, 333), (300, 100), (1, 7), (129, 520), (0, 5), (130, 130))
SetUp = Callable[..., None]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """The kernel runs on the CPU, with so many programs."""

    def set_up(programs: int) -> None:
        machine = Machine(programs)
        names = machine.load(FILES, NAMES)

        def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, *, sizes: Any, warps: int) -> None:
            assert grid == (programs, 1, 1)
            machine.run(kernel, *tensors, *sizes, *numbers)

        monkeypatch.setattr(hopper, "_launcher", lambda kernel: partial(launch, names[kernel.partition(":")[2]]))
        monkeypatch.setattr(hopper, "processors", lambda device: programs)
        monkeypatch.setattr(hopper, "why_unavailable", lambda device: "")
        monkeypatch.setattr(hopper, "_copies_in_bulk", lambda: True)

    return set_up


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """A request's output ``[tokens, heads, dim]`` and statistics ``[heads, tokens]``; rows without keys are 0, -inf."""
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
    """Requests, each with new tokens and keys, over a paged cache, whose unused slots are NaN."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]] = PAGED,
        block_size: int = 16,
        dim: int = 64,
        dim_v: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        self.requests = requests
        pages = [-(-length // block_size) for _, length in requests]
        order = torch.randperm(sum(pages))
        self.table = torch.full((len(requests), max(pages) + 1), -1, dtype=torch.int32)
        cache = numbers(sum(pages) + 1, 2, block_size, dim + dim_v, dtype=dtype).transpose(1, 2)
        unused = torch.ones(len(cache), block_size, dtype=torch.bool)
        self.where = []
        for row, mine, (_, length) in zip(self.table, torch.split(order, pages), requests, strict=True):
            row[: len(mine)] = mine.int()
            position = torch.arange(length)
            self.where.append((mine[position // block_size], position % block_size))
            unused[self.where[-1]] = False
        cache.masked_fill_(unused[:, :, None, None], float("nan"))
        self.key, self.value = cache[..., :dim], cache[..., dim:]
        self.starts = starts([new for new, _ in requests])
        self.lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
        self.query = numbers(int(self.starts[-1]), 4, dim, dtype=dtype)
        self.out = self.query.new_full((len(self.query), 4, dim_v), -7.0)
        self.scale = dim**-0.5

    def arguments(self, causal: bool = True) -> tuple[Any, ...]:
        lengths = (max(new for new, _ in self.requests), max(length for _, length in self.requests))
        caches = (self.key, self.value, self.table)
        return (self.query, *caches, self.starts, self.lengths, *lengths, self.scale, self.out, causal)

    def attend(self, least_new: int) -> None:
        query, key, value, table, first, lengths, *_ = self.arguments()
        rest: dict[str, Any] = {"causal": True, "least_new": least_new, "narrow": False}
        hopper.attend_paged(query, key, value, table, first, lengths, self.scale, self.out, **rest)

    def check(self, causal: bool = True, least_new: int = 0) -> None:
        for index, (new, _) in enumerate(self.requests):
            mine, there = slice(int(self.starts[index]), int(self.starts[index + 1])), self.where[index]
            if new < least_new:
                assert (self.out[mine] == -7.0).all()
            elif new:
                want, _ = expected(self.query[mine], self.key[there], self.value[there], self.scale, causal)
                torch.testing.assert_close(self.out[mine].float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("causal", "block_size", "dim", "dim_v", "dtype", "programs"),
    [
        (True, 16, 64, 64, torch.bfloat16, 3),
        (False, 16, 64, 64, torch.bfloat16, 5),
        (True, 1, 64, 128, torch.float16, 2),
        (True, 48, 128, 128, torch.bfloat16, 4),
        (True, 16, 64, 64, torch.bfloat16, 64),
        (True, 16, 192, 128, torch.bfloat16, 3),
    ],
)
def test_paged_keys(
    on_cpu: SetUp, causal: bool, block_size: int, dim: int, dim_v: int, dtype: torch.dtype, programs: int
) -> None:
    on_cpu(programs)
    batch = Batch(PAGED, block_size, dim, dim_v, dtype)
    assert paged.paged_attention(*batch.arguments(causal)) is batch.out
    batch.check(causal)


def test_short_requests_are_left_to_their_own_route(on_cpu: SetUp) -> None:
    on_cpu(3)
    batch = Batch()
    batch.attend(least_new=65)
    batch.check(least_new=65)


def test_many_programs_that_end_with_short_pieces(on_cpu: SetUp) -> None:
    on_cpu(24)
    batch = Batch([(3, 9)] * 24)
    batch.attend(least_new=0)
    batch.check()


def some_of_many() -> list[tuple[int, int]]:
    """850 requests: one in 17 has more than a new token, but none of those from 512 on to 767; others none or one."""
    some = [(2 + n % 5, 3 + n % 200) if n % 17 == 0 and not 512 <= n < 768 else (n % 2, n % 3) for n in range(850)]
    some[90], some[260], some[840] = (150, 300), (260, 200), (130, 140)
    return some


def test_more_requests_than_are_looked_at_together(on_cpu: SetUp) -> None:
    on_cpu(7)
    batch = Batch(some_of_many())
    batch.attend(least_new=2)
    batch.check(least_new=2)


@pytest.mark.parametrize(
    ("requests", "causal", "heads", "programs", "share"),
    [
        ([(512, 512)] * 4, True, 32, 132, 1.05),
        ([(2048, 2048)] * 4, True, 16, 132, 1.05),
        ([(300, 2000), (700, 700), (130, 100), (0, 9), (1500, 1600)], True, 8, 9, 1.05),
        ([(300, 2000), (700, 700), (130, 0), (0, 9), (1500, 1600)], False, 8, 9, 1.1),
        (some_of_many(), True, 3, 5, 1.3),
    ],
)
def test_programs_share_the_pieces_evenly(
    requests: list[tuple[int, int]], causal: bool, heads: int, programs: int, share: float
) -> None:
    machine = Machine(programs)
    names = machine.load(FILES, ("requests", *SCHEDULER))
    new_starts = Pointer.of(starts([new for new, _ in requests]))
    lengths = Pointer.of(torch.tensor([length for _, length in requests], dtype=torch.int32))
    scheduler = names["Scheduler"](new_starts, lengths, len(requests), heads, 2, True, causal)
    loads, found = [], []
    for machine.program in range(programs):
        cursor, load = scheduler.start(), 0
        while True:
            cursor, request, tile, head = scheduler.find(cursor)
            if request == len(requests):
                break
            new, length = requests[int(request)]
            seen = min(length, length - new + 128 * (int(tile) + 1)) if causal else length
            load += 2 + max(1, -(-seen // 128))  # a piece costs as much as two tiles of keys
            found.append((int(request), int(tile), int(head)))
        loads.append(load)
    tiles = [-(-new // 128) if new > 1 else 0 for new, _ in requests]
    pieces = [(r, t, h) for r, count in enumerate(tiles) for t in range(count) for h in range(heads)]
    assert sorted(found) == sorted(pieces)
    assert max(loads) <= share * sum(loads) / programs


@pytest.mark.parametrize(("causal", "programs", "dim"), [(True, 3, 192), (False, 7, 192), (True, 4, 128)])
def test_keys_in_a_row(on_cpu: SetUp, causal: bool, programs: int, dim: int) -> None:
    on_cpu(programs)
    torch.manual_seed(1)
    heads, dim_v = 2, 128
    query_starts, key_starts = starts([new for new, _ in FLAT]), starts([length for _, length in FLAT])
    query, key = numbers(int(query_starts[-1]), heads, dim), numbers(int(key_starts[-1]), heads, dim)
    value = numbers(int(key_starts[-1]), heads, 2 * dim_v)[..., dim_v:]
    other = slice(int(key_starts[1]), int(key_starts[2]))
    key[other], value[other] = float("nan"), float("nan")  # which is that request's own trouble
    scale = dim**-0.5
    out, lse = latent_prefill.mla_prefill(query, key, value, query_starts, key_starts, 300, 520, scale, None, causal)
    for index, (new, _) in enumerate(FLAT):
        mine = slice(int(query_starts[index]), int(query_starts[index + 1]))
        theirs = slice(int(key_starts[index]), int(key_starts[index + 1]))
        if new and index != 1:
            want, total = expected(query[mine], key[theirs], value[theirs], scale, causal)
            torch.testing.assert_close(out[mine].float(), want, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(lse[:, mine], total, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("more", [{"sliding_window": 9}, {"softcap": 2.0}, {"sinks": torch.zeros(4)}])
def test_what_the_kernel_lacks_takes_the_plain_one(on_cpu: SetUp, more: dict[str, Any]) -> None:
    on_cpu(3)
    with pytest.raises(NotSupported, match="on the CPU"):  # which needs a GPU
        paged.paged_attention(*Batch().arguments(), **more)


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


def test_keys_in_a_row_have_rows_and_places_that_a_descriptor_can_name(
    on_cpu: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(3)
    good = numbers(8, 2, 128)
    assert hopper.fits_in_a_row(good, good, good, good)
    wide, far = (
        torch.empty_strided((8, 3, 128), (*strides, 1), dtype=good.dtype, device="meta")
        for strides in ((1 << 32, 1 << 30), (1 << 34, 128))
    )
    for bad in (good[:0], wide, far, good[:1].expand(8, 2, 128)):
        assert not hopper.fits_in_a_row(good, bad, good, good)
        assert not hopper.fits_in_a_row(good, good, bad, good)
    for other in (torch.float16, torch.float32):
        assert not hopper.fits_in_a_row(good, good, good, good.to(other))
    monkeypatch.setattr(hopper, "_copies_in_bulk", lambda: False)
    assert not hopper.fits_in_a_row(good, good, good, good)


def test_descriptors_have_the_kernels_tiles() -> None:
    bulk = pytest.importorskip("fl_dispatch.backends.triton.impl.hopper.prefill.bulk")
    made: Any = hopper._descriptor(numbers(8, 2, 128))
    assert made.block_shape == [1, 1, bulk.BLOCK_N.value, bulk.CHUNK.value] == [1, 1, bulk.BLOCK_M.value, 64]
    assert made.shape[2] == bulk.ENDLESS.value
    assert all(bound > bulk.ENDLESS.value for bound in made.shape[:2])


def recording(numbers: list[tuple[Any, ...]]) -> Callable[..., None]:
    """A launcher that notes what a kernel is compiled for."""
    return lambda grid, tensors, given, **more: numbers.append(given)


def test_what_is_compiled_depends_on_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "_launcher", {hopper.IN_A_ROW: recording(compiled)}.get)
    monkeypatch.setattr(hopper, "processors", lambda device: 3)
    for tokens in (1, 5, 16):
        query, total = numbers(tokens, 2, 192), torch.zeros(2, tokens)
        offsets = starts([tokens])
        hopper.attend(query, query, query[..., :128], offsets, offsets, 1.0, query, total, causal=True)
    assert compiled[0] == compiled[1] == compiled[2]


@pytest.mark.parametrize(
    ("strides", "narrow"),
    [
        ((1 << 20, 128, 1 << 16, 1), True),
        ((1 << 20, 128, 1 << 29, 1), False),  # heads lie outside blocks
        ((1 << 20, 1 << 27, 128, 1), False),
    ],
)
def test_offsets_of_32_bits_hold_heads_and_slots(
    monkeypatch: pytest.MonkeyPatch, strides: tuple[int, ...], narrow: bool
) -> None:
    compiled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "_launcher", {hopper.PAGED: recording(compiled)}.get)
    monkeypatch.setattr(hopper, "processors", lambda device: 3)
    near = torch.empty((9, 16, 8, 64), dtype=torch.bfloat16, device="meta")
    far = torch.empty_strided(near.shape, strides, dtype=near.dtype, device="meta")
    query, table, lengths = numbers(4, 16, 64), torch.zeros(1, 9), torch.tensor([4])
    for key, value in ((near, far), (far, near)):
        rest: dict[str, Any] = {"causal": True, "least_new": 0}
        hopper.attend_paged(query, key, value, table, starts([4]), lengths, 1.0, query, narrow=True, **rest)
        hopper.attend_paged(query, key, value, table, starts([4]), lengths, 1.0, query, narrow=False, **rest)
    assert [numbers[-1] for numbers in compiled] == [narrow, False] * 2


def test_a_device_that_is_not_hopper_takes_the_plain_kernel() -> None:
    tensor = numbers(4, 2, 128)
    assert hopper.why_unavailable(tensor.device)
    assert not hopper.fits(tensor, tensor, tensor)


def test_it_is_taken_on_its_chip_with_tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    monkeypatch.setattr(hopper, "_launcher", lambda kernel: None)
    for version, capability, why in (
        ("3.6.0", (9, 0), ""),
        ("3.6.1+git1234", (9, 0), ""),
        ("3.8.0", (9, 0), ""),
        ("3.9.0", (9, 0), "it is not tested with Triton 3.9.0"),
        ("3.6.0", (10, 0), "the device is not of compute capability 9"),
    ):
        monkeypatch.setattr(hopper.triton, "__version__", version)
        monkeypatch.setattr(hopper, "device_of", lambda kind: replace(CUDA, capability=lambda index: capability))
        hopper._why_unavailable.cache_clear()
        hopper._copies_in_bulk.cache_clear()
        assert hopper.why_unavailable(torch.device("cuda", 0)) == why
        assert hopper._copies_in_bulk() == version.startswith("3.8")
    hopper._why_unavailable.cache_clear()
    hopper._copies_in_bulk.cache_clear()


def test_chip_features_off_takes_the_plain_kernel_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    monkeypatch.setattr(hopper, "_launcher", lambda kernel: None)
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    monkeypatch.setattr(hopper, "device_of", lambda kind: replace(CUDA, capability=lambda index: (9, 0)))
    hopper._why_unavailable.cache_clear()
    assert hopper.why_unavailable(torch.device("cuda", 0)) == ""
    monkeypatch.setenv("VLLM_FL_CHIP_FEATURES", "0")
    reset_settings()
    why = "chip_features is off (environment variable VLLM_FL_CHIP_FEATURES)"
    assert hopper.why_unavailable(torch.device("cuda", 0)) == why
    hopper._why_unavailable.cache_clear()
