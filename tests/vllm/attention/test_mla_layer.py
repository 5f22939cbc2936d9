"""Latent attention of one layer: context in chunks, warm-up, graphs, and what it declines."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonPrefillMetadata,
    build_mla_chunked_context_metadata,
)
from vllm.v1.attention.backend import AttentionCGSupport

from fl_dispatch import SelectionPolicy, get_default_manager, policy_context
from fl_dispatch.ops import OPERATORS
from vllm_fl.attention import mla
from vllm_fl.attention.mla import MLAFLBackend, MLAFLImpl
from vllm_fl.attention.mla_metadata import MLAFLMetadataBuilder, prefill_starts
from vllm_fl.attention.mla_prefill import MLAFLPrefillBackend, merge
from vllm_fl.compat import accelerator
from vllm_fl.platform import startup
from vllm_fl.worker import warm_up

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


def batch(prefill: Any) -> SimpleNamespace:
    """The description of a batch that has no other part."""
    return SimpleNamespace(prefill=prefill, prefill_starts=prefill_starts(prefill, starts(NEW).tolist()))


def on_meta(part: Any) -> Any:
    """The same description with its tensors on the device without memory."""
    if isinstance(part, Tensor):
        return part.to("meta")
    if isinstance(part, list):
        return [on_meta(entry) for entry in part]
    if hasattr(part, "__dict__") and type(part).__module__ != "builtins":
        return SimpleNamespace(**{name: on_meta(value) for name, value in vars(part).items()})
    return part


def multi_head(query: Tensor, latents: Tensor, rotary: Tensor, layer: MLAFLImpl) -> Tensor:
    """Causal attention of the last tokens of one request over all of it, by PyTorch."""
    key, value = layer._project(latents, rotary[:, None])
    mask = torch.ones(len(query), len(latents), dtype=torch.bool).tril(len(latents) - len(query))
    whole = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), mask, scale=SCALE
    )
    return whole.transpose(0, 1).flatten(1)


PLANS = pytest.mark.parametrize(
    ("metadata", "chunks"),
    [
        (prefill_metadata(64), 2),
        (prefill_metadata(12), 3),
        (prefill_metadata(4), 9),
    ],
    ids=["64 rows", "12 rows", "4 rows"],
)


@PLANS
def test_context_in_any_number_of_chunks_gives_the_same(layer: MLAFLImpl, metadata: Any, chunks: int) -> None:
    cache = torch.full((41, BLOCK, RANK + ROPE), torch.nan)
    query, output = torch.randn(sum(NEW), HEADS, NOPE + ROPE), torch.full((sum(NEW), HEADS * VALUE), torch.nan)
    latents = [torch.randn(context + new, RANK) for context, new in zip(CONTEXT, NEW, strict=True)]
    rotaries = [torch.randn(len(latent), ROPE) for latent in latents]
    for request, (latent, rotary) in enumerate(zip(latents, rotaries, strict=True)):
        layer.do_kv_cache_update(latent, rotary[:, None], cache, slots(request, 0, len(latent)), "auto", None)
    assert len(metadata.chunked_context.chunks) == chunks
    new_latents = torch.cat([latent[context:] for latent, context in zip(latents, CONTEXT, strict=True)])
    new_rotaries = torch.cat([rotary[context:] for rotary, context in zip(rotaries, CONTEXT, strict=True)])
    layer.forward_mha(query, new_latents, new_rotaries[:, None], cache, batch(metadata), None, output)
    parts = zip(query.split(NEW), latents, rotaries, strict=True)
    expected = torch.cat([multi_head(*part, layer) for part in parts])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@PLANS
@pytest.mark.parametrize("first", [0, 5], ids=["", "behind decoding requests"])
def test_the_prefill_gets_the_numbers_in_its_tensors_as_integers_of_the_host(
    layer: MLAFLImpl, metadata: Any, chunks: int, first: int
) -> None:
    """A layer hands them over beside each tensor, so that no kernel has to ask the device."""
    calls: list[tuple[Any, ...]] = []
    attend = layer.fl_prefill
    layer.fl_prefill = lambda *args: (calls.append(args), attend(*args))[1]
    described = SimpleNamespace(
        prefill=metadata, prefill_starts=prefill_starts(metadata, (starts(NEW) + first).tolist())
    )
    query, output = torch.randn(sum(NEW), HEADS, NOPE + ROPE), torch.empty(sum(NEW), HEADS * VALUE)
    latents, rotary = torch.randn(sum(NEW), RANK), torch.randn(sum(NEW), 1, ROPE)
    layer.forward_mha(query, latents, rotary, torch.zeros(41, BLOCK, RANK + ROPE), described, None, output)
    assert len(calls) == 1 + chunks
    for _, _, _, query_start_loc, key_start_loc, *_, query_start_loc_host, key_start_loc_host in calls:
        assert query_start_loc_host == query_start_loc.tolist()
        assert key_start_loc_host == key_start_loc.tolist()


CACHE_SCALE = 0.013


def through_fp8(rows: Tensor) -> Tensor:
    return (rows / CACHE_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * CACHE_SCALE


@pytest.fixture
def fp8_layer(layer: MLAFLImpl, monkeypatch: pytest.MonkeyPatch) -> MLAFLImpl:
    """The layer with a cache in fp8, which vLLM hands over as bytes to write and as numbers to read."""
    made = implementation(kv_b_proj=layer.kv_b_proj, kv_cache_dtype="fp8")
    made.fl_bind("layer")
    context = SimpleNamespace(no_compile_layers={"layer": SimpleNamespace(_k_scale_float=CACHE_SCALE)})
    monkeypatch.setattr(mla, "get_forward_context", lambda: context)
    return made


def test_context_of_a_cache_in_fp8_is_what_was_stored_and_new_tokens_are_as_they_are(fp8_layer: MLAFLImpl) -> None:
    metadata, cache = prefill_metadata(12), torch.zeros(41, BLOCK, RANK + ROPE, dtype=torch.uint8)
    query, output = torch.randn(sum(NEW), HEADS, NOPE + ROPE), torch.full((sum(NEW), HEADS * VALUE), torch.nan)
    rows = [4 * torch.randn(context + new, RANK + ROPE) for context, new in zip(CONTEXT, NEW, strict=True)]
    for request, row in enumerate(rows):
        places = slots(request, 0, len(row))
        fp8_layer.do_kv_cache_update(row[:, :RANK], row[:, None, RANK:], cache, places, "fp8", None)
    new = torch.cat([row[context:] for row, context in zip(rows, CONTEXT, strict=True)])
    read = cache.view(torch.float8_e4m3fn)
    fp8_layer.forward_mha(query, new[:, :RANK], new[:, None, RANK:], read, batch(metadata), None, output)
    seen = [torch.cat((through_fp8(row[:n]), row[n:])) for row, n in zip(rows, CONTEXT, strict=True)]
    parts = zip(query.split(NEW), seen, strict=True)
    expected = torch.cat([multi_head(q, row[:, :RANK], row[:, RANK:], fp8_layer) for q, row in parts])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_decoding_over_a_cache_in_fp8_reads_what_was_stored(fp8_layer: MLAFLImpl) -> None:
    cache, row = torch.zeros(41, BLOCK, RANK + ROPE, dtype=torch.uint8), 4 * torch.randn(9, RANK + ROPE)
    fp8_layer.do_kv_cache_update(row[:, :RANK], row[:, None, RANK:], cache, slots(0, 0, 9), "fp8", None)
    lengths = torch.tensor([9], dtype=torch.int32)
    decode = SimpleNamespace(
        block_table=PAGES[:1], query_start_loc=starts([1]), seq_lens=lengths, max_query_len=1, max_seq_len=9,
        query_start_loc_host=None, seq_lens_host=None,
    )  # fmt: skip
    query, owner = torch.randn(1, HEADS, RANK + ROPE), SimpleNamespace(_k_scale_float=CACHE_SCALE)
    described, read = SimpleNamespace(decode=decode, causal=True), cache.view(torch.float8_e4m3fn)
    found, _ = fp8_layer.forward_mqa(query, read, described, owner)
    keys = through_fp8(row)
    weights = (query[0] @ keys.T * SCALE).softmax(-1)
    torch.testing.assert_close(found[0], weights @ keys[:, :RANK], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 1]])
def test_a_batch_is_tried_on_a_cache_in_fp8_outside_of_a_step(
    fp8_layer: MLAFLImpl, queries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = torch.randint(0, 127, (41, BLOCK, RANK + ROPE), dtype=torch.uint8)
    before = cache.clone()
    monkeypatch.setattr(mla, "get_forward_context", None)
    fp8_layer.fl_try(cache, queries, 40)
    assert torch.equal(cache, before)


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


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_layer_asks_whether_every_implementation_takes_the_parts_of_a_query(
    layer: MLAFLImpl, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, asked = get_default_manager(), []

    def all_take(op_name: str, given: Any) -> bool:
        asked.append((op_name, *given))
        return in_parts

    monkeypatch.setattr(manager, "all_take", all_take)
    layer.fl_bind("model.layers.0.self_attn.attn")
    assert asked == [("mla_decode", "query_rope")]
    assert layer.fl_in_parts is in_parts


@pytest.mark.parametrize("in_parts", [True, False])
def test_decoding_gives_a_query_as_the_implementations_take_it(layer: MLAFLImpl, in_parts: bool) -> None:
    torch.manual_seed(1)
    cache, absorbed, rope = (
        torch.randn(41, BLOCK, RANK + ROPE),
        torch.randn(4, HEADS, RANK),
        torch.randn(4, HEADS, ROPE),
    )
    lengths = torch.tensor([length + 1 for length in CONTEXT], dtype=torch.int32)
    decode = SimpleNamespace(
        block_table=PAGES, query_start_loc=starts([1] * 4), seq_lens=lengths, max_query_len=1, max_seq_len=40,
        query_start_loc_host=None, seq_lens_host=None,
    )  # fmt: skip
    given: list[tuple[int, ...]] = []
    real = layer.fl_decode

    def recorded(query: Tensor, *args: Any) -> Any:
        given.append(tuple(query.shape))
        return real(query, *args)

    assert layer.fl_in_parts
    layer.fl_decode, layer.fl_in_parts = recorded, in_parts
    whole, parted = (
        layer.forward_mqa(query, cache, SimpleNamespace(decode=decode, causal=True), None)[0]
        for query in (torch.cat((absorbed, rope), dim=-1), (absorbed, rope))
    )
    layer.fl_try(cache, [1], 40)
    assert [shape[-1] for shape in given] == [RANK + ROPE, *[RANK if in_parts else RANK + ROPE] * 2]
    assert torch.equal(whole, parted)


# ---- graphs


@pytest.mark.parametrize(("queries", "operator"), [([1, 1, 1], "mla_decode"), ([3, 1], "mla_prefill")])
def test_a_batch_is_tried_with_its_operator_and_the_cache_keeps_its_contents(
    layer: MLAFLImpl, queries: list[int], operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for name, attribute in (("mla_decode", "fl_decode"), ("mla_prefill", "fl_prefill"), ("kv_cache_write", "fl_write")):
        real = getattr(layer, attribute)

        def tried(*args: Any, name: str = name, real: Any = real, **hints: Any) -> Any:
            called.append(name)
            return real(*args, **hints)

        monkeypatch.setattr(layer, attribute, tried)
    cache = torch.randn(41, BLOCK, RANK + ROPE)
    before = cache.clone()
    layer.fl_try(cache, queries, 40)
    assert set(called) == {"kv_cache_write", operator}
    assert torch.equal(cache, before)


def test_nothing_waits_for_the_device(layer: MLAFLImpl) -> None:
    """On PyTorch's device without memory, where reading a value raises; a captured graph can read none either."""
    layer.kv_b_proj = lambda latent: (latent.new_empty(len(latent), HEADS * (NOPE + VALUE)), None)
    layer.fl_write = lambda *args, **hints: None
    layer.fl_decode, layer.fl_prefill = OPERATORS["mla_decode"].fake, OPERATORS["mla_prefill"].fake
    part = prefill_metadata(8)
    metadata = SimpleNamespace(prefill=on_meta(part), prefill_starts=batch(part).prefill_starts)
    tokens, decodes = sum(NEW), len(NEW)
    with torch.device("meta"):
        cache, slot_mapping = torch.empty(41, BLOCK, RANK + ROPE), torch.empty(tokens, dtype=torch.int64)
        latents, rotary = torch.empty(tokens, RANK), torch.empty(tokens, 1, ROPE)
        query, output = torch.empty(tokens, HEADS, NOPE + ROPE), torch.empty(tokens, HEADS * VALUE)
        absorbed = (torch.empty(decodes, HEADS, RANK), torch.empty(decodes, HEADS, ROPE))
        block_table, lengths = torch.empty(decodes, 9, dtype=torch.int32), torch.empty(decodes, dtype=torch.int32)
        first = torch.empty(decodes + 1, dtype=torch.int32)
    layer.do_kv_cache_update(latents, rotary, cache, slot_mapping, "auto", None)
    layer.forward_mha(query, latents, rotary, cache, metadata, None, output)
    builder = SimpleNamespace(seq_lens_host=None)
    build: Any = MLAFLMetadataBuilder._build_decode
    decode = build(builder, block_table, lengths, 36, starts([1] * decodes), first, decodes, max_query_len=1)
    attended, _ = layer.forward_mqa(absorbed, cache, SimpleNamespace(decode=decode, causal=True), None)
    assert attended.shape == (decodes, HEADS, RANK)
    with pytest.raises(RuntimeError, match="meta"):
        lengths.max().item()


def test_one_layer_of_a_kind_is_tried_with_every_batch_that_the_scheduler_allows(layer: MLAFLImpl) -> None:
    accelerator.silence_accelerator()
    tried: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    model = torch.nn.ModuleList(torch.nn.Identity() for _ in tried)
    for place, module in enumerate(model):
        module.kv_cache = torch.empty(0) if place == 2 else torch.zeros(41, BLOCK, RANK + ROPE)
        module.impl = SimpleNamespace(
            fl_bind=layer.fl_bind,
            fl_kind=layer.fl_kind,
            fl_try=lambda cache, queries, longest, place=place: tried[place].append((len(queries), longest)),
        )
    limits = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4)
    length = SimpleNamespace(max_model_len=300)
    calls = warm_up.attention(model, SimpleNamespace(scheduler_config=limits, model_config=length))
    assert [len(tried[place]) for place in tried] == [calls, 0, 0]
    assert {(1, 1), (1, 256), (1, 300), (2, 300)} <= set(tried[0])
    assert max(requests for requests, _ in tried[0]) == 2  # 5 and 40 are more than the scheduler's


def test_layers_under_other_rules_are_of_another_kind(layer: MLAFLImpl) -> None:
    kind = layer.fl_kind()
    assert layer.fl_kind() == kind
    with policy_context(SelectionPolicy.from_dict(per_op_order={"mla_decode": ["reference"]})):
        assert layer.fl_kind() != kind


def test_graphs_are_captured_for_batches_of_requests_with_as_many_new_tokens() -> None:
    support = MLAFLBackend.get_builder_cls().get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


# ---- what it can do


@pytest.mark.parametrize(
    ("option", "named"),
    [({"sliding_window": 8}, "a sliding window"), ({"logits_soft_cap": 30.0}, "a soft cap")],
)
def test_what_latent_attention_cannot_do_is_named(layer: MLAFLImpl, option: dict[str, Any], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        implementation(**option)


def test_any_head_size_and_caches_in_fp8_are_accepted_and_sparse_attention_is_not() -> None:
    assert MLAFLBackend.is_mla()
    assert MLAFLBackend.supports_head_size(40)
    assert MLAFLBackend.supports_block_size(16)
    assert not MLAFLBackend.is_sparse()
    assert MLAFLBackend.supports_kv_cache_dtype("fp8")
    assert not MLAFLBackend.supports_kv_cache_dtype("fp8_ds_mla")
    assert not MLAFLBackend.supports_kv_cache_dtype("int8_per_token_head")
