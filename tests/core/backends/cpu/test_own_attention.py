"""Attention in C++ of our own (``vendor.cpu.cpp``): verified, the same in every batch, never outside of its tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch import cpp, get_default_manager
from fl_dispatch.backends.vendor.cpu.impl import own_attention
from fl_dispatch.backends.vendor.cpu.impl.own_attention import why_unavailable
from fl_dispatch.errors import DispatchError
from fl_dispatch.evidence.verify import implementations, verify

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 10, 2, 48, 32, 12
DTYPES = (torch.float32, torch.bfloat16)


def caches(dtype: torch.dtype, by_dimension: bool) -> tuple[Tensor, Tensor]:
    """Random keys and values, a block's keys token by token or dimension by dimension."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(BLOCKS, BLOCK, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
    if by_dimension:
        keys = keys.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return keys, values


def attended(query: Tensor, keys: Tensor, values: Tensor, lengths: list[tuple[int, int]], **rest: Any) -> Tensor:
    """Attention of requests with so many new tokens and keys, whose blocks lie behind each other."""
    new, whole = (torch.tensor(numbers) for numbers in zip(*lengths, strict=True))
    table = torch.arange(len(lengths) * 4, dtype=torch.int32).view(-1, 4) % len(keys)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0))).int()
    bounds = int(new.max()), int(whole.max()), 0.3
    return own_attention.paged_attention(query, keys, values, table, starts, whole.int(), *bounds, **rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_right_wherever_it_runs(dtype: torch.dtype) -> None:
    manager = get_default_manager()
    found = implementations(manager, ["kv_cache_write", "paged_attention"], ["vendor.cpu.cpp"])
    assert len(found) == 2
    for impl in found:
        result = verify(manager, impl, dtype, torch.device("cpu"), repeats=1, race_calls=50)
        assert (result.verdict, result.problems) == ("right", [])
        assert result.samples >= 13


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_threads(dtype: torch.dtype, by_dimension: bool) -> None:
    keys, values = caches(dtype, by_dimension)
    query = torch.randn(8, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    lengths, rest = [(5, 90), (1, 33), (2, 128)], {"sliding_window": 70, "softcap": 20.0}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = attended(query, keys, values, lengths, **rest)
        torch.set_num_threads(2)
        assert torch.equal(attended(query, keys, values, lengths, **rest), together)
    finally:
        torch.set_num_threads(threads)
    alone = attended(query[:5], keys, values, lengths[:1], **rest)
    assert torch.equal(alone, together[:5])
    last = attended(query[4:5], keys, values, [(1, 90)], **rest)
    assert torch.equal(last, together[4:5]), "a token alone, and at the end of a prompt's part"


@pytest.mark.parametrize("by_dimension", [False, True])
def test_what_is_no_number_reaches_the_result_where_it_is_visible_and_only_there(by_dimension: bool) -> None:
    keys, values = caches(torch.float32, by_dimension)
    query = torch.ones(1, HEADS, DIM)
    right = attended(query, keys, values, [(1, 40)], sliding_window=20)
    for cache in (keys, values):
        before = cache.clone()
        cache[0, :20] = cache[1, 8:] = cache[2:] = float("nan")
        assert torch.equal(attended(query, keys, values, [(1, 40)], sliding_window=20), right)
        cache[0, 30, 1] = float("nan")
        found = attended(query, keys, values, [(1, 40)], sliding_window=20)
        assert torch.equal(found[:, : HEADS // 2], right[:, : HEADS // 2])
        assert found[:, HEADS // 2 :].isnan().all()
        cache.copy_(before)
    assert attended(query * float("nan"), keys, values, [(1, 40)]).isnan().all()
    keys.abs_()
    assert attended(query * float("inf"), keys, values, [(1, 40)]).isnan().all()
    keys[0], keys[1] = float("-inf"), 1.0
    assert torch.equal(
        attended(query, keys, values, [(1, 40)]), attended(query, keys, values, [(1, 40)], sliding_window=8)
    )


def test_tensors_that_do_not_belong_together_are_declined() -> None:
    keys, values = caches(torch.float32, False)
    query, table = torch.zeros(3, HEADS, DIM), torch.zeros(2, 4).int()
    starts, lengths = torch.tensor([0, 2, 3]).int(), torch.tensor([4, 5]).int()
    good: dict[str, Any] = {
        "query": query, "key_cache": keys, "value_cache": values, "block_table": table, "query_start_loc": starts,
        "seq_lens": lengths, "max_query_len": 2,
    }  # fmt: skip
    assert own_attention.supports_paged_attention(**good) is True
    for name, wrong, reason in (
        ("out", query.bfloat16(), "out is torch.bfloat16, not torch.float32"),
        ("out", query[:2], "not as many results as there are queries"),
        ("query", query.half(), "query is torch.float16"),
        ("query_start_loc", starts[:2], "not as many starts and tables as lengths"),
        ("block_table", table[:1], "not as many starts and tables as lengths"),
        ("block_table", table.to("meta"), "not torch.int32 on the CPU"),
        ("seq_lens", lengths.long(), "not torch.int32 on the CPU"),
        ("sinks", torch.zeros(HEADS - 1), "not as many slopes or sinks as heads"),
        ("key_cache", keys[:0], "key_cache is empty"),
        ("query", query[:, :9], "do not belong together"),
        ("value_cache", values[:4], "do not belong together"),
    ):
        assert reason in str(own_attention.supports_paged_attention(**{**good, name: wrong})), name
    new, slots = torch.zeros(2, KV_HEADS, DIM), torch.arange(2)
    assert own_attention.supports_kv_cache_write(new, new, keys, values, slots) is True
    for key, where, reason in (
        (new[:1], slots, "fewer keys or values than slots"),
        (new[:, :1], slots, "other ones than the cache has"),
        (new, slots.int(), "slot_mapping is torch.int32"),
    ):
        assert reason in str(own_attention.supports_kv_cache_write(key, new, keys, values, where))


def test_a_block_or_a_slot_outside_of_the_cache_is_an_error() -> None:
    keys, values = caches(torch.float32, True)
    query = torch.zeros(1, HEADS, DIM)
    for table, length in (([[BLOCKS]], 3), ([[-1]], 3), ([[0]], BLOCK + 1)):
        numbers = torch.tensor(table).int(), torch.tensor([0, 1]).int(), torch.tensor([length]).int()
        with pytest.raises(IndexError, match="a row, a block or a slot lies outside"):
            own_attention.paged_attention(query, keys, values, *numbers, 1, length, 1.0)
    rows = torch.tensor([[0]]).int(), torch.tensor([0, 2]).int(), torch.tensor([2]).int()
    with pytest.raises(IndexError, match="paged_attention: a row"):
        own_attention.paged_attention(query, keys, values, *rows, 2, 2, 1.0)
    new = torch.ones(2, KV_HEADS, DIM)
    with pytest.raises(IndexError, match="kv_cache_write: a row, a block or a slot"):
        own_attention.kv_cache_write(new, new, keys, values, torch.tensor([-1, BLOCKS * BLOCK]))
    assert not (keys == 1).any()


def test_where_it_does_not_compile_it_is_not_available_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("this is no C++")
    monkeypatch.setattr(own_attention, "SOURCE", wrong)
    assert re.search(r"^wrong.cpp does not compile: .* ended with \d+: .*wrong.cpp:1:1: error", why_unavailable())
    with pytest.raises(DispatchError, match="ended with"):
        cpp.load(wrong)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DispatchError, match=r"there is no C\+\+ compiler \(g\+\+, "):
        cpp.load(tmp_path / "another.cpp")
