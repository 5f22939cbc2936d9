"""Emulated attention against plain attention, head by head."""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu

from on_chip import Numbers, close, npu

TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """[queries, heads, D] attention, head by head, in double precision."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    made = []
    for head in range(heads):
        scores = query[:, head].double() @ key[:, head // groups].double().t() / math.sqrt(query.shape[2])
        if hidden is not None:
            scores[hidden] = -math.inf
        made.append(scores.softmax(-1) @ value[:, head // groups].double())
    return torch.stack(made, 1)


def causal(queries: int, keys: int, window: int | None = None) -> torch.Tensor:
    row, column = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    hidden = column > row
    return hidden if window is None else hidden | (column < row - window)


CASES = {"all": (0, None, None), "causal": (3, TRIANGLE, None), "window": (4, TRIANGLE, 7)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", [1, 2])
def test_paged_attention_of_mixed_sequences(case: str, version: int, normal: Numbers) -> None:
    """A decode, a chunk and a prefill, in pages that lie apart, as [blocks, block_size, H]."""
    mode, mask, window = CASES[case]
    queries, keys = [1, 5, 20], [33, 40, 20]
    query = normal(26, 4, 128, dtype=torch.bfloat16)
    cache_k, cache_v = (normal(12, 16, 256, dtype=torch.bfloat16) for _ in range(2))
    table = torch.tensor([[7, 2, 9], [1, 11, 4], [3, 0, 0]], dtype=torch.int32)
    shared = {
        "block_table": table.npu(),
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "sparse_mode": mode,
        "atten_mask": None if mask is None else mask.npu(),
        "pre_tokens": 2147483647 if window is None else window,
        "next_tokens": 2147483647 if window is None else 0,
        "block_size": 16,
    }
    ends, scale = [1, 6, 26], 1 / math.sqrt(128)
    first = torch_npu.npu_fused_infer_attention_score
    second = torch_npu.npu_fused_infer_attention_score_v2
    arguments = (query.npu(), cache_k.npu(), cache_v.npu())
    if version == 1:
        made, lse = first(
            *arguments, actual_seq_lengths=ends, actual_seq_lengths_kv=keys, num_heads=4, scale=scale, **shared
        )
    else:
        made, lse = second(
            *arguments, actual_seq_qlen=ends, actual_seq_kvlen=keys, num_query_heads=4, softmax_scale=scale, **shared
        )
    assert lse.numel() == 0
    for number, end in enumerate(ends):
        k, v = (c[table[number].long()].view(48, 2, 128)[: keys[number]] for c in (cache_k, cache_v))
        rows = slice(end - queries[number], end)
        hidden = None if mask is None else causal(queries[number], keys[number], window)
        close(made[rows], attention(query[rows], k, v, hidden), atol=1e-2, rtol=1e-2)


def test_pages_may_have_heads_before_tokens(normal: Numbers) -> None:
    query, cache = normal(2, 2, 128, dtype=torch.float16), normal(3, 2, 16, 128, dtype=torch.float16)
    made, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(), cache.npu(), cache.npu(), actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[16, 3],
        block_table=npu([[2], [1]], torch.int32), num_heads=2, scale=1 / math.sqrt(128), input_layout="TND",
        block_size=16,
    )  # fmt: skip
    k = cache[1].transpose(0, 1)[:3]
    close(made[1:], attention(query[1:], k, k, None), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_layouts_of_a_prefill_without_pages(layout: str, normal: Numbers) -> None:
    q, k, v = normal(2, 5, 4, 32), normal(2, 5, 2, 32), normal(2, 5, 2, 32)
    expected = torch.stack([attention(*rows, causal(5, 5)) for rows in zip(q, k, v, strict=True)])

    def laid(x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2) if layout == "BSH" else x.transpose(1, 2) if layout.startswith("BNSD") else x
        return x.contiguous().half().npu()

    made, lse = torch_npu.npu_fused_infer_attention_score(
        laid(q), laid(k), laid(v), atten_mask=TRIANGLE.npu(), num_heads=4, num_key_value_heads=2,
        scale=1 / math.sqrt(32), input_layout=layout, sparse_mode=2, softmax_lse_flag=True,
    )  # fmt: skip
    expected = expected.flatten(2) if layout == "BSH" else expected.transpose(1, 2) if layout == "BNSD" else expected
    close(made, expected, atol=3e-3, rtol=3e-3)
    assert lse.shape == (2, 4, 5, 1)
    first = (q[1, 0, 3] @ k[1, 0, 1]) / math.sqrt(32)  # the first query sees the first key alone
    assert lse[1, 3, 0, 0].item() == pytest.approx(first.item(), abs=2e-3)


def test_one_query_ignores_the_window_unless_packed(normal: Numbers) -> None:
    q, k = normal(1, 1, 2, 128, dtype=torch.float16), normal(1, 30, 2, 128, dtype=torch.float16)
    made, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(), k.npu(), k.npu(), atten_mask=TRIANGLE.npu(), num_heads=2, scale=1 / math.sqrt(128),
        input_layout="BSND", sparse_mode=4, pre_tokens=3, next_tokens=0,
    )  # fmt: skip
    close(made[0], attention(q[0], k[0], k[0], None), atol=2e-3, rtol=2e-3)


def test_a_sink_takes_its_share_of_the_softmax(normal: Numbers) -> None:
    q, k = normal(1, 2, 128, dtype=torch.bfloat16), torch.zeros(3, 2, 128, dtype=torch.bfloat16)
    made, lse = torch_npu.npu_fused_infer_attention_score_v2(
        q.npu(), k.npu(), (k + 1).npu(), actual_seq_qlen=[1], actual_seq_kvlen=[3], num_query_heads=2,
        input_layout="TND", learnable_sink=npu([0.0, math.log(5)], torch.bfloat16), return_softmax_lse=True,
    )  # fmt: skip
    close(made[0, :, 0], [3 / 4, 3 / 8], atol=4e-3, rtol=4e-3)
    close(lse.flatten(), [math.log(4), math.log(8)], atol=1e-2, rtol=1e-2)


def test_latent_attention_adds_the_rotary_scores(normal: Numbers) -> None:
    q, q_rope = normal(2, 8, 512, dtype=torch.bfloat16), normal(2, 8, 64, dtype=torch.bfloat16)
    latent, rope = normal(4, 16, 512, dtype=torch.bfloat16), normal(4, 16, 64, dtype=torch.bfloat16)
    made, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(), latent.npu(), latent.npu(), query_rope=q_rope.npu(), key_rope=rope.npu(), actual_seq_lengths=[1, 2],
        actual_seq_lengths_kv=[20, 9], block_table=npu([[3, 1], [0, 0]], torch.int32), num_heads=8,
        num_key_value_heads=1, scale=1 / math.sqrt(576), input_layout="TND", block_size=16,
    )  # fmt: skip
    keys = torch.cat((latent, rope), -1)[[3, 1]].view(32, 1, 576)[:20]
    expected = attention(torch.cat((q, q_rope), -1)[:1], keys, keys[..., :512], None)
    close(made[:1], expected, atol=1e-2, rtol=1e-2)


def test_fusion_attention_takes_float32_and_cumulative_keys(normal: Numbers) -> None:
    q, k, v = normal(7, 4, 16), normal(9, 2, 16), normal(9, 2, 16)
    made = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), 4, "TND", scale=0.25, atten_mask=TRIANGLE.npu(), sparse_mode=3,
        actual_seq_qlen=[3, 7], actual_seq_kvlen=[5, 9],
    )  # fmt: skip
    close(made[0][:3], attention(q[:3], k[:5], v[:5], causal(3, 5)))
    close(made[0][3:], attention(q[3:], k[5:], v[5:], causal(4, 4)))


def test_parts_of_attention_merge_to_the_whole(normal: Numbers) -> None:
    scores, values = normal(6, 10), normal(10, 8)
    parts = [(scores[:, a:b], values[a:b]) for a, b in ((0, 4), (4, 10))]
    lse = [s.logsumexp(-1).npu() for s, _ in parts]
    out = [(s.softmax(-1) @ v).npu() for s, v in parts]
    merged, total = torch_npu.npu_attention_update(lse, out, 1)
    close(merged, scores.softmax(-1) @ values)
    close(total, scores.logsumexp(-1))


KEYS, QUERIES = [33, 40, 20], [1, 5, 20]
TABLE = torch.tensor([[7, 2, 9], [1, 11, 4], [3, 6, 0]], dtype=torch.int32)


def integers(*shape: int) -> torch.Tensor:
    """Numbers whose sums of products float32 has, so that equal scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).half()


def test_the_indexer_lists_the_best_keys_and_of_equal_ones_the_first() -> None:
    query, weights, cache = integers(26, 4, 128), integers(26, 4).float(), integers(12, 16, 1, 128)
    ends = torch.tensor(QUERIES).cumsum(0).int()
    found, _ = torch_npu.npu_lightning_indexer(
        query.npu(), cache.npu(), weights.npu(), actual_seq_lengths_query=ends.npu(),
        actual_seq_lengths_key=npu(KEYS, torch.int32), block_table=TABLE.npu(), layout_query="TND",
        layout_key="PA_BSND", sparse_count=8, sparse_mode=3,
    )  # fmt: skip
    for number, end in enumerate(ends.tolist()):
        keys = cache[TABLE[number].long()].view(48, 128)
        for row in range(end - QUERIES[number], end):
            seen = KEYS[number] - (end - row) + 1
            scores = [float(weights[row] @ (query[row].float() @ key.float()).relu()) for key in keys[:seen]]
            best = sorted(range(seen), key=lambda place: (-scores[place], place))[:8]
            assert found[row, 0].tolist() == best + [-1] * (8 - len(best))


@pytest.mark.parametrize("paged", [True, False])
def test_sparse_attention_reads_listed_keys_alone(paged: bool, normal: Numbers) -> None:
    query, rope = normal(26, 4, 512, dtype=torch.bfloat16), normal(26, 4, 64, dtype=torch.bfloat16)
    latents, ropes = (normal(12, 16, 1, size, dtype=torch.bfloat16) for size in (512, 64))
    lists = torch.tensor([[3, 19, -1]], dtype=torch.int32).expand(26, 1, 3).contiguous()
    ends = torch.tensor(QUERIES).cumsum(0).int()
    keys = [
        [one[TABLE[n].long()].view(48, 1, -1)[:length] for one in (latents, ropes)] for n, length in enumerate(KEYS)
    ]
    given = (latents, ropes) if paged else tuple(torch.cat(parts) for parts in zip(*keys, strict=True))
    lengths = torch.tensor(KEYS, dtype=torch.int32)
    made, *_ = torch_npu.npu_sparse_flash_attention(
        query.npu(), given[0].npu(), given[0].npu(), lists.npu(), 1 / 24, query_rope=rope.npu(),
        key_rope=given[1].npu(), block_table=TABLE.npu() if paged else None, actual_seq_lengths_query=ends.npu(),
        actual_seq_lengths_kv=(lengths if paged else lengths.cumsum(0).int()).npu(), layout_query="TND",
        layout_kv="PA_BSND" if paged else "TND", sparse_mode=0, attention_mode=2,
    )  # fmt: skip
    for number, end in enumerate(ends.tolist()):
        latent, rotary = (one[[3, 19]].squeeze(1).double() for one in keys[number])
        for row in range(end - QUERIES[number], end):
            scores = torch.cat((query[row], rope[row]), -1).double() @ torch.cat((latent, rotary), -1).t() / 24
            close(made[row], scores.softmax(-1) @ latent, atol=1e-2, rtol=1e-2)
