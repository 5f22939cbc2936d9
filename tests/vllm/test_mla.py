"""Multi-head latent attention: tokens equal Hugging Face's, from the prefix cache too, and both operators matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, ran, start
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonPrefillMetadata,
    build_mla_chunked_context_metadata,
)

from vllm_fl import startup
from vllm_fl.mla import MLAFLBackend, MLAFLImpl
from vllm_fl.mla_prefill import MLAFLPrefillBackend, merge

LAYERS = 3
FAMILY = "deepseek_v2"
PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin"}
WRONG = ("mla_decode", "mla_prefill")


def step(**policy: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "policy": {"prefer": "reference", **policy}}


# ---- in the engine


@pytest.fixture(scope="session")
def result(checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    """One engine: two right passes, one with each operator wrong, and a right one; prompts are chunked at 64 tokens."""
    wrong = [step(per_op_order={operator: ["impl:vendor.wrong"]}) for operator in WRONG]
    return start(checkpoint(FAMILY), step(), step(), *wrong, step(), variables=PLUGIN).result()


def test_tokens_equal_hugging_face(result: dict[str, Any], expected: Callable[[str], list[list[int]]]) -> None:
    assert result["steps"][0]["cached"] == [0] * len(PROMPTS)
    assert result["steps"][0]["tokens"] == expected(FAMILY)


def test_a_pass_over_cached_context_gives_the_same_tokens(
    result: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["steps"][1]["cached"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert result["steps"][1]["tokens"] == expected(FAMILY)


def test_both_forms_ran_and_no_layer_is_native(result: dict[str, Any]) -> None:
    report = result["report"]
    assert report["attention"] == {"MLAFLImpl": LAYERS}
    assert report["native_layers"] == {}
    assert report["failed"] == {}
    for operator in WRONG:
        assert ran(result, operator) == {"reference.torch", "vendor.wrong"}
    assert "kv_cache_write reference.torch" in report["counts"]
    assert not ran(result, "paged_attention")


@pytest.mark.parametrize("position", range(len(WRONG)), ids=WRONG)
def test_a_wrong_implementation_changes_the_tokens(
    position: int, result: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["steps"][2 + position]["tokens"] != expected(FAMILY)
    assert result["steps"][-1]["tokens"] == expected(FAMILY)


# ---- one layer


HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 4, 16, 12, 8, 10, 4
CONTEXT, NEW = [10, 0, 5, 13], [3, 2, 1, 4]  # tokens of each request: cached, and of this step
SCALE = 0.25
PAGES = 1 + torch.randperm(40, generator=torch.Generator().manual_seed(3)).view(4, 10).int()


@pytest.fixture
def layer() -> Iterator[MLAFLImpl]:
    torch.manual_seed(0)
    startup.activate()
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK)
    with set_current_vllm_config(VllmConfig()):
        yield implementation(kv_b_proj=lambda latent: (latent @ weight.T, None))


def implementation(**options: Any) -> MLAFLImpl:
    given = {
        "num_heads": HEADS,
        "head_size": RANK + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": VALUE,
        "kv_b_proj": None,
    }
    return MLAFLImpl(**{**given, **options})


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def slots(request: int, first: int, last: int) -> Tensor:
    places = torch.arange(first, last)
    return PAGES[request, places // BLOCK].long() * BLOCK + places % BLOCK


def prefill_metadata(workspace_rows: int) -> MLACommonPrefillMetadata:
    chunked = build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(CONTEXT),
        prefill_query_start_loc_cpu=starts(NEW),
        chunked_prefill_workspace=torch.empty(0),
        chunked_prefill_workspace_size=workspace_rows,
        block_size=BLOCK,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
    )
    return MLACommonPrefillMetadata(PAGES, starts(NEW), max(NEW), chunked_context=chunked)


def multi_head(query: Tensor, latents: Tensor, rotary: Tensor, layer: MLAFLImpl) -> Tensor:
    """Causal attention of the last tokens of one request over all of it, by PyTorch."""
    key, value = layer._project(latents, rotary[:, None])
    mask = torch.ones(len(query), len(latents), dtype=torch.bool).tril(len(latents) - len(query))
    whole = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), mask, scale=SCALE
    )
    return whole.transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("workspace_rows", "chunks"), [(64, 2), (12, 3), (4, 9)])
def test_context_in_any_number_of_chunks_gives_the_same(layer: MLAFLImpl, workspace_rows: int, chunks: int) -> None:
    cache = torch.full((41, BLOCK, RANK + ROPE), torch.nan)
    query, output = torch.randn(sum(NEW), HEADS, NOPE + ROPE), torch.full((sum(NEW), HEADS * VALUE), torch.nan)
    latents = [torch.randn(context + new, RANK) for context, new in zip(CONTEXT, NEW, strict=True)]
    rotaries = [torch.randn(len(latent), ROPE) for latent in latents]
    for request, (latent, rotary) in enumerate(zip(latents, rotaries, strict=True)):
        layer.do_kv_cache_update(latent, rotary[:, None], cache, slots(request, 0, len(latent)), "auto", None)
    metadata = prefill_metadata(workspace_rows)
    assert len(metadata.chunked_context.chunks) == chunks
    new_latents = torch.cat([latent[context:] for latent, context in zip(latents, CONTEXT, strict=True)])
    new_rotaries = torch.cat([rotary[context:] for rotary, context in zip(rotaries, CONTEXT, strict=True)])
    layer.forward_mha(query, new_latents, new_rotaries[:, None], cache, SimpleNamespace(prefill=metadata), None, output)
    parts = zip(query.split(NEW), latents, rotaries, strict=True)
    expected = torch.cat([multi_head(*part, layer) for part in parts])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_padding_is_neither_written_nor_read(layer: MLAFLImpl) -> None:
    cache = torch.zeros(41, BLOCK, RANK + ROPE)
    mapping = torch.cat((slots(0, 0, 2), torch.tensor([-1])))
    layer.do_kv_cache_update(torch.ones(5, RANK), torch.ones(5, 1, ROPE), cache, mapping, "auto", None)
    assert cache.count_nonzero() == 2 * (RANK + ROPE)
    layer.do_kv_cache_update(torch.ones(1, RANK), torch.ones(1, 1, ROPE), torch.empty(0), mapping, "auto", None)


def test_merging_with_parts_that_saw_no_key() -> None:
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    nothing, never = torch.zeros(3, 2, 4), torch.full((2, 3), -torch.inf)
    kept, kept_lse = out.clone(), lse.clone()
    merge(kept, kept_lse, nothing, never)
    assert torch.equal(kept, out)
    assert torch.equal(kept_lse, lse)
    merge(nothing, never, nothing.clone(), never.clone())
    assert torch.equal(nothing, torch.zeros(3, 2, 4))
    assert never.isneginf().all()


def test_vllms_prefill_backend_gives_what_the_layer_gives(layer: MLAFLImpl) -> None:
    """For attention classes that leave the prefill to vLLM's common code."""
    backend = MLAFLPrefillBackend(HEADS, SCALE, RANK, NOPE, ROPE, VALUE, None).clone()
    metadata = prefill_metadata(64)
    backend.prepare_metadata(metadata)
    query, key = torch.randn(sum(NEW), HEADS, NOPE + ROPE), torch.randn(sum(NEW), HEADS, NOPE + ROPE)
    value = torch.randn(sum(NEW), HEADS, VALUE)
    expected = layer.fl_prefill(query, key, value, starts(NEW), starts(NEW), 4, 4, SCALE)
    actual = backend.run_prefill_new_tokens(query, key, value, return_softmax_lse=True)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(backend.run_prefill_new_tokens(query, key, value, return_softmax_lse=False), expected[0])
    first, second = metadata.chunked_context.chunks  # of the first request, and of the last two
    key, value = torch.randn(CONTEXT[0], HEADS, NOPE + ROPE), torch.randn(CONTEXT[0], HEADS, VALUE)
    out, lse = backend.run_prefill_context_chunk(first, query[first.token_slice], key, value)
    scores = torch.einsum("qhd,khd->hqk", query[: NEW[0]], key) * SCALE
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    assert (second.token_slice.start, second.token_slice.stop) == (sum(NEW[:2]), sum(NEW))


@pytest.mark.parametrize(
    ("option", "named"),
    [({"sliding_window": 8}, "a sliding window"), ({"logits_soft_cap": 30.0}, "a soft cap")],
)
def test_what_latent_attention_cannot_do_is_named(layer: MLAFLImpl, option: dict[str, Any], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        implementation(**option)


def test_any_head_size_and_plain_cache_types_are_accepted_and_sparse_attention_is_not() -> None:
    assert MLAFLBackend.is_mla()
    assert MLAFLBackend.supports_head_size(40)
    assert MLAFLBackend.supports_block_size(16)
    assert not MLAFLBackend.is_sparse()
    assert not MLAFLBackend.supports_kv_cache_dtype("fp8")
