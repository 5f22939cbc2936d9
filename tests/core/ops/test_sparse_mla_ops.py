"""Sparse latent attention: which tokens a query lists, how index keys lie in their cache, and attention over lists."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.ops import OPERATORS, sparse_mla

REFERENCE = ReferenceBackend()
HEADS, DIM, RANK, ROPE = 4, 16, 32, 8
SCALE = (RANK // 4 + ROPE) ** -0.5


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def best_by_hand(query: Tensor, weights: Tensor, keys: Tensor, place: int, topk: int) -> list[int]:
    """The tokens that one query lists, by a loop over tokens and heads; equal scores in the order of positions."""
    scores = []
    for key in keys[: place + 1]:
        products = [max(0.0, float(head @ key)) for head in query]
        scores.append(sum(float(weight) * product for weight, product in zip(weights, products, strict=True)))
    best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:topk]
    return sorted(best) + [-1] * (topk - len(best))


@pytest.mark.parametrize("topk", [1, 5, 12, 30])
def test_a_query_lists_what_a_loop_over_tokens_and_heads_finds(topk: int) -> None:
    """The second chunk of one prompt and a decoding request, whose blocks lie in any order among foreign NaN."""
    lengths, new, block_size = (21, 14), (6, 1), 4
    table = torch.tensor([[6, 1, 4, 2, 7, 3], [10, 8, 9, 5, 0, 0]], dtype=torch.int32)
    cache = torch.full((11, block_size, DIM), math.nan, dtype=torch.float64)
    keys = [torch.randn(length, DIM, dtype=torch.float64) for length in lengths]
    for row, each in zip(table, keys, strict=True):
        for position, key in enumerate(each):
            cache[row[position // block_size], position % block_size] = key
    query, weights = torch.randn(7, HEADS, DIM, dtype=torch.float64), torch.randn(7, HEADS, dtype=torch.float64)
    given = (query, weights, cache, table, ints(0, 6, 7), ints(*lengths), 6, 21, topk)
    found = REFERENCE.index_topk(*given)
    places = [(0, 15 + row) for row in range(6)] + [(1, 13)]
    expected = [
        best_by_hand(query[row], weights[row], keys[request], place, topk)
        for row, (request, place) in enumerate(places)
    ]
    assert found.tolist() == expected
    assert new == (6, 1)


def test_of_equal_scores_the_lower_position_is_listed() -> None:
    """Scores of 0, because no head's product is positive; of 1; and below 0, whose sign is not that of a zero."""
    keys = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0, 0.0])[:, None].expand(-1, DIM).clone() / DIM
    query, weights = torch.ones(1, 1, DIM), torch.ones(1, 1)
    rest = (keys[None], ints(0)[None], ints(0, 1), ints(7), 1, 7)
    assert REFERENCE.index_topk(query, weights, *rest, 5).tolist() == [[0, 1, 2, 3, 4]]
    assert REFERENCE.index_topk(query, weights, *rest, 2).tolist() == [[1, 3]]
    assert REFERENCE.index_topk(query, -weights, *rest, 3).tolist() == [[0, 2, 5]]
    assert REFERENCE.index_topk(-query, -weights, *rest, 3).tolist() == [[0, 1, 2]]


def test_a_query_with_as_few_tokens_as_are_taken_lists_them_all() -> None:
    query, keys = torch.randn(3, HEADS, DIM), torch.randn(1, 8, DIM)
    listed = REFERENCE.index_topk(query, torch.randn(3, HEADS), keys, ints(0)[None], ints(0, 3), ints(6), 3, 6, 6)
    assert listed.tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5]]


def test_queries_taken_in_parts_list_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    query, weights, keys = torch.randn(9, HEADS, DIM), torch.randn(9, HEADS), torch.randn(1, 30, DIM)
    given = (query, weights, keys, ints(0)[None], ints(0, 9), ints(30), 9, 30, 7)
    whole = REFERENCE.index_topk(*given)
    monkeypatch.setattr(sparse_mla, "SCORES_AT_ONCE", 2 * HEADS * 30)
    assert REFERENCE.index_topk(*given).equal(whole)


def test_index_keys_in_fp8_have_the_least_power_of_two_that_holds_them() -> None:
    """With the scales of a block behind its keys, as DeepGEMM and its hosts lay them out."""
    block_size = 4
    memory = torch.zeros(3, block_size * (128 + 4), dtype=torch.uint8)
    cache = memory[:, : block_size * 128].view(torch.float8_e4m3fn).view(3, block_size, 128)
    scales = memory[:, block_size * 128 :].view(torch.float32).view(3, block_size, 1)
    key = torch.randn(5, 128) * torch.tensor([1.0, 100.0, 1e-3, 448.0, 0.0])[:, None]
    key[3, 7] = 448.0
    key[3].clamp_(-448, 448)
    slots = torch.tensor([5, 0, 11, 3, -1])
    REFERENCE.index_key_write(key, cache, slots, scales)
    largest = key.abs().amax(1).clamp(min=1e-4)
    for token, slot in enumerate(slots[:4].tolist()):
        scale = float(scales[slot // block_size, slot % block_size])
        assert math.frexp(scale)[0] == 0.5
        assert scale / 2 < largest[token] / 448 <= scale
        expected = (key[token] / scale).to(torch.float8_e4m3fn).float()
        assert cache[slot // block_size, slot % block_size].float().equal(expected)
    assert float(scales[0, 3]) == 1.0
    assert memory[1].count_nonzero() == memory[1, 128:256].count_nonzero() + memory[1, -12:-8].count_nonzero()


def test_scores_count_the_scales_of_a_cache_in_fp8() -> None:
    keys = torch.ones(1, 4, 128).to(torch.float8_e4m3fn)
    scales = torch.tensor([1.0, 4.0, 2.0, 4.0])[None, :, None]
    given = (torch.ones(1, 1, 128), torch.ones(1, 1), keys, ints(0)[None], ints(0, 1), ints(4), 1, 4)
    assert REFERENCE.index_topk(*given, 2, None, scales).tolist() == [[1, 3]]
    assert REFERENCE.index_topk(*given, 3, None, scales).tolist() == [[1, 2, 3]]


def test_queries_of_a_cache_in_fp8_are_rounded_as_keys_are() -> None:
    """In units of 1, which 448 asks for, 17 lies between 16 and 18, and goes to the even one; so two tokens are equal.

    The scale of another head, which needs a smaller one, does not matter.
    """
    query = torch.zeros(1, 2, 128)
    query[0, 0, :3], query[0, 1, 5] = torch.tensor([448.0, 16.0, 17.0]), 0.3
    keys = torch.zeros(1, 3, 128)
    keys[0, 0, 1] = keys[0, 1, 2] = 1.0
    rest = (ints(0)[None], ints(0, 1), ints(3), 1, 3, 1, None)
    assert REFERENCE.index_topk(query, torch.ones(1, 2), keys, *rest).tolist() == [[1]]
    stored, scales = keys.to(torch.float8_e4m3fn), torch.ones(1, 3, 1)
    assert REFERENCE.index_topk(query, torch.ones(1, 2), stored, *rest, scales).tolist() == [[0]]


@pytest.mark.parametrize("dim", [128, 160])
def test_a_cache_in_fp8_lists_what_queries_and_keys_list_that_were_written_to_one(dim: int) -> None:
    """Of keys with one scale and with two."""
    query, key, weights = torch.randn(5, HEADS, dim), torch.randn(30, dim), torch.randn(5, HEADS)
    groups, rest = -(-dim // 128), (ints(0)[None], ints(0, 5), ints(30), 5, 30, 7, None)

    def written(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache, scales = torch.zeros(1, *rows.shape).to(torch.float8_e4m3fn), torch.zeros(1, len(rows), groups)
        REFERENCE.index_key_write(rows, cache, torch.arange(len(rows)), scales)
        return cache, scales, cache.float() * scales.repeat_interleave(128, -1)[..., :dim]

    cache, scales, keys = written(key)
    rounded = written(query.flatten(0, 1))[2].view(query.shape)
    found = REFERENCE.index_topk(query, weights, cache, *rest, scales)
    assert found.equal(REFERENCE.index_topk(rounded, weights, keys, *rest))
    assert not rounded.equal(query)


def test_attention_over_all_visible_tokens_is_that_of_a_decode() -> None:
    lengths, block_size = ints(21, 9), 4
    table = torch.tensor([[6, 1, 4, 2, 7, 3], [9, 8, 5, 0, 0, 0]], dtype=torch.int32)
    cache = torch.randn(10, block_size, RANK + ROPE, dtype=torch.float64)
    query, starts = torch.randn(5, HEADS, RANK + ROPE, dtype=torch.float64), ints(0, 3, 5)
    seen = (19, 20, 21, 8, 9)
    lists = torch.stack([torch.where(torch.arange(21) < count, torch.arange(21), -1) for count in seen]).int()
    expected = REFERENCE.mla_decode(query, cache, table, starts, lengths, 3, 21, SCALE, RANK)
    found = REFERENCE.mla_sparse(query, cache, lists, table, starts, 3, SCALE, RANK)
    torch.testing.assert_close(found, expected)
    fewer = REFERENCE.mla_sparse(query, cache, lists.where(lists != 5, lists[:, :1]), table, starts, 3, SCALE, RANK)
    assert not torch.allclose(fewer, expected, rtol=1e-3)


def test_attention_reads_listed_tokens_alone() -> None:
    cache = torch.full((1, 8, RANK + ROPE), math.nan)
    cache[0, [2, 5]] = torch.randn(2, RANK + ROPE)
    query, lists = torch.randn(1, HEADS, RANK + ROPE), ints(5, 2, -1)[None]
    found = REFERENCE.mla_sparse(query, cache, lists, ints(0)[None], ints(0, 1), 1, SCALE, RANK)
    weights = (query[0] @ cache[0, [2, 5]].T * SCALE).softmax(-1)
    torch.testing.assert_close(found[0], weights @ cache[0, [2, 5], :RANK])


def test_work_counts_visible_pairs_of_the_indexer_and_listed_rows_of_attention() -> None:
    query, weights, cache = torch.zeros(2, HEADS, DIM), torch.zeros(2, HEADS), torch.zeros(2, 16, DIM)
    given = (query, weights, cache, ints(0, 1)[None], ints(0, 2), ints(20), 2, 20, 8)
    work = OPERATORS["index_topk"].work(*given)
    assert work.operations == 2 * (19 + 20) * HEADS * (DIM + 1)
    assert work.bytes_moved == 4 * (20 * DIM + 2 * (HEADS * (DIM + 1) + 8))
    lists, latents = torch.tensor([[3, 1, -1], [0, -1, -1]]).int(), torch.zeros(2, 16, RANK + ROPE)
    query = torch.zeros(2, HEADS, RANK + ROPE)
    attended = OPERATORS["mla_sparse"].work(query, latents, lists, ints(0, 1)[None], ints(0, 2), 2, SCALE, RANK)
    assert attended.operations == 2 * 3 * HEADS * (RANK + ROPE + RANK)
