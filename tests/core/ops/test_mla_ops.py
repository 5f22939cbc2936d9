"""Multi-head latent attention: both forms are one function, and results over parts of the context can be merged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.ops import OPERATORS, mla

REFERENCE = ReferenceBackend()
HEADS, RANK, NOPE, ROPE, VALUE = 4, 32, 16, 8, 12
SCALE = (NOPE + ROPE) ** -0.5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def prefill(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    rows, keys = len(query), len(key)
    return REFERENCE.mla_prefill(query, key, value, offsets(rows), offsets(keys), rows, keys, SCALE, None, causal)


def test_the_absorbed_form_equals_the_multi_head_form() -> None:
    """Written to a paged cache by ``kv_cache_write``, with weights absorbed as a host does it."""
    length, block_size = 21, 4
    latent, rotary = random(length, RANK), random(length, ROPE)
    up_key, up_value = random(HEADS, NOPE, RANK), random(HEADS, VALUE, RANK)
    query, query_rotary = random(length, HEADS, NOPE), random(length, HEADS, ROPE)

    key = torch.cat((torch.einsum("tr,hnr->thn", latent, up_key), rotary[:, None].expand(-1, HEADS, -1)), dim=-1)
    value = torch.einsum("tr,hvr->thv", latent, up_value)
    expected, _ = prefill(torch.cat((query, query_rotary), dim=-1), key, value)

    cache = torch.full((8, block_size, RANK + ROPE), math.nan, dtype=torch.float64)
    pages = torch.tensor([[6, 1, 4, 2, 7, 3]], dtype=torch.int32)
    places = torch.arange(length)
    slots = pages[0, places // block_size].long() * block_size + places % block_size
    rows = cache.unsqueeze(2)
    REFERENCE.kv_cache_write(latent[:, None], rotary[:, None], rows[..., :RANK], rows[..., RANK:], slots)
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", query, up_key), query_rotary), dim=-1)
    lengths = torch.tensor([length], dtype=torch.int32)
    # Memory that was never written is NaN, so nothing but this request's rows may take part.
    attended = REFERENCE.mla_decode(absorbed, cache, pages, offsets(length), lengths, length, length, SCALE, RANK)
    torch.testing.assert_close(torch.einsum("thr,hvr->thv", attended, up_value), expected)


def test_the_absorbed_form_over_a_cache_in_fp8_equals_the_multi_head_form_of_what_is_stored() -> None:
    """One scale for whole rows, which a write gets for both parts."""
    length, unit = 21, 0.013
    latent, rotary = 3 * random(length, RANK), 3 * random(length, ROPE)
    cache = torch.zeros(6, 4, 1, RANK + ROPE).to(torch.float8_e4m3fn)
    parts = cache[..., :RANK], cache[..., RANK:]
    REFERENCE.kv_cache_write(latent[:, None], rotary[:, None], *parts, torch.arange(length), unit, unit)
    rows = ((torch.cat((latent, rotary), -1) / unit).clamp(-448, 448).to(torch.float8_e4m3fn).double() * unit)[:, None]
    query = random(length, HEADS, RANK + ROPE)
    expected, _ = prefill(query, rows.expand(-1, HEADS, -1), rows[..., :RANK].expand(-1, HEADS, -1))
    pages, lengths = torch.arange(6, dtype=torch.int32)[None], torch.tensor([length], dtype=torch.int32)
    given = (pages, offsets(length), lengths, length, length, SCALE, RANK, None, True)
    torch.testing.assert_close(REFERENCE.mla_decode(query, cache.squeeze(2), *given, unit), expected)
    assert not torch.allclose(REFERENCE.mla_decode(query, cache.squeeze(2), *given, 1.01 * unit), expected, rtol=1e-3)


@pytest.mark.parametrize("bounds", [(5, 13), (1, 2, 20)])
def test_merged_parts_of_the_context_equal_the_whole(bounds: tuple[int, ...]) -> None:
    new, context = 6, 20
    query = random(new, HEADS, NOPE + ROPE)
    key, value = random(context + new, HEADS, NOPE + ROPE), random(context + new, HEADS, VALUE)
    expected, expected_lse = prefill(query, key, value)
    parts = [prefill(query, key[context:], value[context:])]
    for first, last in zip((0, *bounds), (*bounds, context), strict=True):
        parts.append(prefill(query, key[first:last], value[first:last], causal=False))
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    merged = sum(part * torch.exp(part_lse - lse).t()[..., None] for part, part_lse in parts)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(merged, expected)


def test_a_row_that_sees_no_key_is_zero_with_an_infinitely_small_sum() -> None:
    query, key, value = random(3, HEADS, 8), random(2, HEADS, 8), random(2, HEADS, VALUE)
    out, lse = prefill(query, key, value)
    assert out[0].count_nonzero() == 0
    assert lse[:, 0].isneginf().all()
    assert out[1:].isfinite().all()
    assert lse[:, 1:].isfinite().all()
    nothing, sums = prefill(query, key[:0], value[:0], causal=False)
    assert nothing.count_nonzero() == 0
    assert sums.isneginf().all()


def test_queries_taken_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = random(11, HEADS, 24), random(30, HEADS, 24), random(30, HEADS, VALUE)
    whole = prefill(query, key, value)
    monkeypatch.setattr(mla, "SCORES_AT_ONCE", 2 * HEADS * 30)
    torch.testing.assert_close(prefill(query, key, value), whole, rtol=1e-12, atol=1e-12)


def test_the_sum_is_kept_in_float32_for_half_types() -> None:
    args = [random(5, HEADS, 24), random(5, HEADS, 24), random(5, HEADS, VALUE)]
    out, lse = prefill(*(tensor.to(torch.bfloat16) for tensor in args))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    _, expected = prefill(*(tensor.to(torch.bfloat16).double() for tensor in args))
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


def test_each_form_is_a_phase_of_its_own() -> None:
    for name, phase in (("mla_decode", "decode"), ("mla_prefill", "prefill")):
        for sample in OPERATORS[name].samples(torch.float32, torch.device("cpu"), torch.Generator()):
            workload = OPERATORS[name].workload(*sample.args)
            assert (workload.phase, workload.tokens) == (phase, len(sample.args[0]))


def test_work_counts_the_visible_pairs_of_both_forms() -> None:
    cache = torch.zeros(4, 16, RANK + ROPE)
    table, lengths = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    query = torch.zeros(2, HEADS, RANK + ROPE)
    work = OPERATORS["mla_decode"].work(query, cache, table, offsets(2), lengths, 2, 20, SCALE, RANK)
    assert work.operations == 2 * (19 + 20) * HEADS * (RANK + ROPE + RANK)
    assert work.bytes_moved == 4 * (20 * (RANK + ROPE) + 2 * HEADS * (RANK + ROPE + RANK))
    query, key, value = torch.zeros(2, HEADS, 24), torch.zeros(5, HEADS, 24), torch.zeros(5, HEADS, VALUE)
    chunk = OPERATORS["mla_prefill"].work(query, key, value, offsets(2), offsets(5), 2, 5, SCALE, None, False)
    assert chunk.operations == 2 * 2 * 5 * HEADS * (24 + VALUE)
