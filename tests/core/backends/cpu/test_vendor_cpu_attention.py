"""The compiled attention kernels of vLLM's CPU build, against the references, on a cache in their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import attention, limits, tiles
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl
from tensors import alike

MISSING = library.why_unavailable()
WRITE, ATTEND = "kv_cache_write", "paged_attention"
KEYS, VALUES = {WRITE: (2, 3), ATTEND: (1, 2)}, {WRITE: 3, ATTEND: 2}

needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING)
each_operator = pytest.mark.parametrize("name", [WRITE, ATTEND])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def implementation(name: str) -> OpImpl:
    return as_called(register_builtins, name, "vendor.cpu")


def answer(impl: OpImpl, args: tuple[Any, ...]) -> bool | str:
    assert impl.supports is not None
    return impl.supports(*args)


def moved(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same caches in the kernels' layout."""
    blocks, block_size, kv_heads, head_dim = keys.shape
    page = torch.empty(blocks, kv_heads, block_size * (head_dim + values.shape[3]), dtype=keys.dtype)
    first, second = page[..., : block_size * head_dim], page[..., block_size * head_dim :]
    key_cache = first.unflatten(-1, (head_dim, block_size)).permute(0, 3, 1, 2)
    value_cache = second.unflatten(-1, (block_size, -1)).transpose(1, 2)
    return key_cache.copy_(keys), value_cache.copy_(values)


def samples(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Every sample of the operator, its caches in the kernels' layout."""
    first, second = KEYS[name]
    for sample in OPERATORS[name].samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(0)):
        args = list(sample.args)
        args[first], args[second] = moved(args[first], args[second])
        yield Sample(sample.label, tuple(args), sample.serving)


def supported(name: str, dtype: torch.dtype) -> Iterator[tuple[Sample, Sample]]:
    """Every sample that the kernel takes, twice; of attention none in a type to which the build truncates."""
    pairs = list(zip(samples(name, dtype), samples(name, dtype), strict=True))
    if name == ATTEND and not limits.rounds(dtype):
        reasons = {answer(implementation(name), sample.args) for sample, _ in pairs if "8 cache" not in sample.label}
        assert reasons == {"the build for this processor truncates results to bfloat16"}
        return
    fit = [pair for pair in pairs if answer(implementation(name), pair[0].args) is True]
    refused = {sample.label for sample, _ in pairs} - {sample.label for sample, _ in fit}
    left_out = {"value narrower than key", "latent cache, 512 and 64 elements", "block size 1"}
    assert {label for label in refused if "8 cache" not in label} <= left_out, "the kernels take the rest"
    yield from fit


@needs_kernels
@each_dtype
def test_the_cache_holds_the_same_bits_as_after_the_reference(dtype: torch.dtype) -> None:
    for sample, again in supported(WRITE, dtype):
        implementation(WRITE).fn(*sample.args)
        ReferenceBackend().kv_cache_write(*again.args)
        for actual, wanted in zip(sample.args, again.args, strict=True):
            assert alike(actual, wanted), sample.label


@needs_kernels
@each_dtype
def test_attention_agrees_with_the_reference(dtype: torch.dtype) -> None:
    tolerance = OPERATORS[ATTEND].tolerances[dtype]
    for sample, again in supported(ATTEND, dtype):
        wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in again.args]
        actual, wanted = implementation(ATTEND).fn(*sample.args), ReferenceBackend().paged_attention(*wide)
        tokens = int(sample.args[4][-1])
        error = (actual - wanted).abs()[:tokens] - tolerance.atol - tolerance.rtol * wanted[:tokens].abs()
        assert actual.dtype is dtype
        assert not (error > 0).any(), f"{sample.label}: {error.max()} beyond the tolerance"
        out = sample.args[9]
        if out is not None:
            assert actual is out
            assert torch.equal(out[tokens:], again.args[9][tokens:]), "rows that no request covers are left alone"


@needs_kernels
def test_entries_of_the_table_that_no_visible_key_needs_may_hold_anything() -> None:
    for sample, again in supported(ATTEND, torch.float32):
        args = list(sample.args)
        block_size, window, lengths = args[1].shape[1], args[11] if len(args) > 11 else None, args[5]
        starts, table = args[4], args[3].clone()
        for row, length in enumerate(lengths.tolist()):
            first = 0 if window is None else max(0, length - int(starts[row + 1] - starts[row]) - window + 1)
            table[row, : first // block_size] = 10**8
            table[row, -(-length // block_size) :] = 10**8
        args[3] = table
        tokens = int(starts[-1])
        actual = implementation(ATTEND).fn(*args)[:tokens]
        assert torch.equal(actual, implementation(ATTEND).fn(*again.args)[:tokens]), sample.label


@needs_kernels
@each_dtype
@pytest.mark.parametrize("leftover", [float("nan"), float("inf")])
def test_what_another_request_left_behind_the_end_of_a_sequence_reaches_no_result(
    dtype: torch.dtype, leftover: float
) -> None:
    for sample, again in supported(ATTEND, dtype):
        _, keys, values, table, _, lengths = sample.args[:6]
        used = torch.zeros(keys.shape[:2], dtype=torch.bool)
        for row, length in zip(table, lengths.tolist(), strict=True):
            positions = torch.arange(length)
            used[row[positions // keys.shape[1]].long(), positions % keys.shape[1]] = True
        keys[~used] = values[~used] = leftover
        tokens = int(sample.args[4][-1])
        actual = implementation(ATTEND).fn(*sample.args)[:tokens]
        expected = implementation(ATTEND).fn(*again.args)[:tokens]
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3, msg=sample.label)


needs_tiles = pytest.mark.skipif(bool(MISSING) or not library.has_tiles(), reason=MISSING or "no matrix unit")
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "in both directions": {"causal": False},
    "a window": {"sliding_window": 50},
    "soft caps": {"softcap": 20.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.8, 4)},
}


LENGTHS = [[(300, 300)], [(128, 700), (257, 257), (1, 33)], [(100, 2000)]]


@needs_tiles
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(("option", "lengths"), [*product(OPTIONS, LENGTHS[:2]), ("causal", LENGTHS[2])], ids=str)
def test_long_prompts_are_multiplied_by_the_matrix_unit_on_copies(
    option: str, lengths: list[tuple[int, int]], host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "AT_ONCE", 256)
    copied, copies = list[int](), tiles.copies
    monkeypatch.setattr(tiles, "copies", lambda *args: copied.append(1) or copies(*args))
    options = OPTIONS[option]
    args = prompts(lengths)
    starts, seq_lens = args[4:6]
    lists = {"query_start_loc_host": starts.tolist(), "seq_lens_host": seq_lens.tolist()} if host else {}
    wide = [each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
    exact = OPERATORS[ATTEND].reference(*wide, **options)
    found = attention.paged_attention(*args, **options, **lists)
    assert copied
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=1e-2)


def prompts(lengths: list[tuple[int, int]], heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> list[Any]:
    """Arguments of attention over requests of (tokens, keys), with NaN behind their ends, in the kernels' layout."""
    generator, block_size = torch.Generator().manual_seed(0), 32
    tokens, keys = zip(*lengths, strict=True)
    counts = [-(-length // block_size) for length in keys]
    numbers, shape = torch.randperm(sum(counts), generator=generator), (sum(counts), block_size, kv_heads, head_dim)
    caches = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
    table, first = torch.zeros(len(lengths), max(counts), dtype=torch.int32), 0
    for row, (length, count) in enumerate(zip(keys, counts, strict=True)):
        table[row, :count] = numbers[first : first + count]
        for cache in caches:
            cache[table[row, count - 1], length - (count - 1) * block_size :] = float("nan")
        first += count
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    query = torch.randn(sum(tokens), heads, head_dim, generator=generator).bfloat16()
    rest = (table, starts, torch.tensor(keys).int(), max(tokens), max(keys), head_dim**-0.5)
    return [query, *moved(*caches), *rest]


@pytest.mark.parametrize(
    ("starts", "lengths", "window", "pays"),
    [
        ([0, 64], [512], -1, True),
        ([0, 63], [512], -1, False),
        ([0, 512, 513], [512, 4096], -1, False),  # a decode beside the prompt has too many keys
        ([0, 512, 513], [512, 3000], -1, True),
        ([0, 64], [512], 300, False),
        ([0, 1 << 26], [1 << 20], -1, False),  # too large a copy
        ([0, 0], [0], -1, False),
    ],
)
def test_copies_pay_with_many_tokens_for_each_key(
    starts: list[int], lengths: list[int], window: int, pays: bool
) -> None:
    assert tiles.pays(8, 128, starts, lengths, window) is pays


def test_vectors_multiply_other_dtypes_short_prompts_and_odd_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "has_tiles", lambda: True)
    query = torch.zeros(64, 4, 64, dtype=torch.bfloat16)
    assert tiles.may_pay(query, 64)
    assert not tiles.may_pay(query, 63)
    assert not tiles.may_pay(query.float(), 64)
    assert not tiles.may_pay(query[..., :48], 64)
    monkeypatch.setattr(library, "has_tiles", lambda: False)
    assert not tiles.may_pay(query, 64)


@needs_kernels
def test_a_nan_of_the_request_itself_stays() -> None:
    for sample, _ in supported(ATTEND, torch.float32):
        if sample.label == "decode with out, block size 32":
            sample.args[0][1] = float("nan")
            result = implementation(ATTEND).fn(*sample.args)
            assert result[1].isnan().all()
            assert result[[0, 2, 3]].isfinite().all()
            return
    pytest.fail("the sample is gone")


@needs_kernels
def test_keys_that_come_with_other_values_are_paired_anew() -> None:
    keys, values = moved(torch.zeros(2, 32, 2, 64), torch.zeros(2, 32, 2, 64))
    others = moved(torch.zeros(2, 32, 2, 64), torch.zeros(2, 32, 2, 64))[1]
    token = torch.randn(1, 2, 64)
    for cache in (values, others, values):
        cache.zero_()
        implementation(WRITE).fn(token, token, keys, cache, torch.tensor([33]))
        assert torch.equal(cache[1, 1], token[0])
    assert "layout" in str(answer(implementation(WRITE), (token, token, keys, torch.zeros(2, 32, 2, 64), None)))


@needs_kernels
@pytest.mark.parametrize("head_dim", sorted(attention.HEAD_DIMS))
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_every_head_size_that_is_admitted_has_a_kernel(head_dim: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    page = torch.randn(3, block_size, 2, 2 * head_dim, generator=generator)
    caches = moved(page[..., :head_dim], page[..., head_dim:])
    rows = torch.randn(2, 6, head_dim + 8, generator=generator)[..., :head_dim]  # rows of a wider projection
    write = (rows[:, :2], rows[:, 2:4], *caches, torch.tensor([block_size + 3, 5]))
    table, starts = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    attend = (rows[:, 2:], *caches, table, starts, torch.tensor([block_size + 4], dtype=torch.int32), 2, 64, 0.125)
    assert answer(implementation(WRITE), write) is answer(implementation(ATTEND), attend) is True
    implementation(WRITE).fn(*write)
    assert torch.equal(caches[0][1, 3], rows[0, :2])
    expected = ReferenceBackend().paged_attention(*attend)
    torch.testing.assert_close(implementation(ATTEND).fn(*attend), expected, atol=1e-5, rtol=1e-5)


def test_what_the_kernels_cannot_do_is_declined_with_a_reason() -> None:
    page = torch.zeros(2, 32, 2, 128)
    good = moved(page[..., :64], page[..., 64:])
    rest = (torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([5]), 1, 5, 1.0)
    query = torch.zeros(1, 2, 64)

    def narrow(size: int, block_size: int = 32) -> tuple[Tensor, Tensor]:
        part = page[:, :block_size, :, :size]
        return moved(part, part)

    separate = good[0], moved(page[..., :64], page[..., :64])[1].repeat(1, 1, 2, 1)[:, :, ::2]
    cases: dict[str, tuple[Any, ...]] = {
        "is torch.float64": (query.double(), *good),
        "caches are torch.float32": (query.half(), *good),
        "head size 40 is not one of 32, 48": (query[..., :40], *narrow(40)),
        "value size 32 is not the head size": (query, *moved(page[..., :64], page[..., 64:96])),
        "block size 8 is not a multiple of 16": (query, *narrow(64, 8)),
        "layout is not HDN/HND": (query, page[..., :64], page[..., 64:]),
        "layout is not HDN/HND (strides": (query, *separate),
        "side by side": (query.repeat(1, 1, 2)[..., ::2], *good),
        "out is not contiguous": (query, *good, *rest, torch.zeros(1, 2, 128)[..., :64]),
    }
    for reason, args in cases.items():
        given = args if len(args) > 3 else (*args, *rest)
        assert reason in str(answer(implementation(ATTEND), given))
        if "out" not in reason and "caches" not in reason:
            key = args[0] if "side by side" in reason else args[0][:, :1]
            assert reason in str(answer(implementation(WRITE), (key, key, *args[1:], torch.zeros(1))))
    assert answer(implementation(ATTEND), (query, *good, *rest)) is True


@each_operator
def test_a_host_with_another_cache_layout_does_not_get_them(name: str) -> None:
    assert implementation(name).requires == {"kv_layout": "HDN/HND"}


@needs_kernels
def test_kernels_with_another_layout_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later vLLM may keep its blocks otherwise: one token is written, and looked for."""
    assert attention.find_layout_problem() == ""
    registered = [implementation(name) for name in (WRITE, ATTEND)]
    write: Callable[..., None] = attention.kv_cache_write
    monkeypatch.setattr(
        attention, "kv_cache_write", lambda k, v, keys, values, slots: write(k, v, keys, values, slots + 1)
    )
    assert "do not keep a block as HDN/HND" in attention.find_layout_problem()
    monkeypatch.setattr(attention, "_layout_problem", attention.find_layout_problem)
    assert not any(impl.is_available() for impl in registered)
