"""SGLang's layers, as its plugin makes them; see ``host_cases``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_cases
import torch
from host_cases import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, PAGE, POSITIONS, REQUESTS, TOPK
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from torch import Tensor, nn

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 128,
    "max_position_embeddings": POSITIONS,
    "torch_dtype": "float32",
}


def norm(name: str) -> Callable[[Tensor], Callable[..., Any]]:
    from sglang.srt.layers import layernorm

    def make(weight: Tensor) -> Any:
        layer = getattr(layernorm, name)(HIDDEN, eps=host_cases.EPSILON)
        layer.weight.data.copy_(weight)
        return layer

    return make


def rotary(size: int, neox: bool) -> Any:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding(HEAD_SIZE, size, POSITIONS, 10000, neox, torch.float32)


def attend(window: int | None, soft_cap: float) -> Callable[..., list[Tensor]]:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_fl.attention.attention_backend import AttentionFLBackend
    from sglang_fl.attention.pools import KVPoolFL
    from sglang_fl.layers import classes

    table = host_cases.pages()
    pool = KVPoolFL(
        max(map(max, table)) * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=KV_HEADS,
        head_dim=HEAD_SIZE,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    positions = torch.zeros(len(REQUESTS), POSITIONS, dtype=torch.int32)
    for row, pages in enumerate(table):
        every = host_cases.slots(row, 0, len(pages) * PAGE)
        positions[row, : len(every)] = torch.tensor(every, dtype=torch.int32)
    backend = AttentionFLBackend(
        SimpleNamespace(
            attention_chunk_size=None,
            model_config=SimpleNamespace(context_len=512),
            page_size=PAGE,
            req_to_token_pool=SimpleNamespace(req_to_token=positions),
            token_to_kv_pool=pool,
        )
    )
    layer = RadixAttention(
        HEADS,
        HEAD_SIZE,
        HEAD_SIZE**-0.5,
        KV_HEADS,
        0,
        logit_cap=soft_cap,
        sliding_window_size=-1 if window is None else window - 1,  # the tokens before a token's own
    )
    classes.prepare(nn.ModuleDict({"attn": layer}))  # as when a model is loaded

    def step(query: Tensor, key: Tensor, value: Tensor, before: list[int], after: list[int]) -> Tensor:
        slots = [
            slot for row, span in enumerate(zip(before, after, strict=True)) for slot in host_cases.slots(row, *span)
        ]
        new = [last - first for first, last in zip(before, after, strict=True)]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND if max(new) > 1 else ForwardMode.DECODE,
            encoder_lens=None,
            seq_lens=torch.tensor(after),
            seq_lens_cpu=torch.tensor(after),
            req_pool_indices=torch.arange(len(after)),
            extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=new,
            out_cache_loc=torch.tensor(slots),
            spec_info=None,
        )
        backend.init_forward_metadata(batch)
        key, value = (x.view(len(slots), KV_HEADS, HEAD_SIZE) for x in (key, value))
        return backend.forward(query, key, value, layer, batch)

    def both(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        parts = zip(*(tensor.split((sum(REQUESTS), len(REQUESTS))) for tensor in (query, key, value)), strict=True)
        first, second = list(REQUESTS), [length + 1 for length in REQUESTS]
        spans = (([0] * len(REQUESTS), first), (first, second))
        return [step(*part, *span) for part, span in zip(parts, spans, strict=True)]

    return both


def route(logits: Tensor) -> tuple[Tensor, Tensor]:
    from sglang.srt.layers.moe.topk import TopK

    weights, ids, _ = TopK(TOPK, layer_id=0, renormalize=True)(torch.zeros(len(logits), HIDDEN), logits)
    return weights, ids


def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    layer = FusedMoE(
        num_experts=host_cases.EXPERTS,
        top_k=TOPK,
        hidden_size=HIDDEN,
        intermediate_size=host_cases.INNER,
        layer_id=0,
        prefix="experts",
        params_dtype=torch.float32,
    )
    layer.w13_weight.data.copy_(w13)
    layer.w2_weight.data.copy_(w2)
    chosen = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, weights))
    return layer.quant_method.apply(layer=layer, dispatch_output=chosen).hidden_states


def main() -> None:
    load_plugins()
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.platforms import current_platform
    from sglang.srt.server_args import ServerArgs

    from sglang_fl.platform import startup

    assert startup.PLATFORM.endswith(type(current_platform).__name__)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        arguments = ServerArgs(model_path=folder, skip_tokenizer_init=True, device="cpu", load_format="dummy")
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    startup.activate()
    initialize_moe_config()
    host_cases.run(
        host_cases.Layers(
            silu=SiluAndMul(),
            gelu=GeluAndMul(approximate="tanh"),
            norm=norm("RMSNorm"),
            gemma_norm=norm("GemmaRMSNorm"),
            rotary=rotary,
            attend=attend,
            route=route,
            experts=experts,
        )
    )


if __name__ == "__main__":
    torch._dynamo.config.disable = True
    main()
