"""vLLM's layers, as its plugin makes them; see ``host_cases``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import host_cases
import torch
from host_cases import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, PAGE, POSITIONS, REQUESTS, TOPK
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from fl_dispatch import bind_op
from vllm.plugins import load_general_plugins
from vllm_fl.platform import startup


def norm(name: str) -> Callable[[Tensor], Callable[..., Any]]:
    from vllm.model_executor.layers import layernorm

    def make(weight: Tensor) -> Any:
        layer = getattr(layernorm, name)(HIDDEN, eps=host_cases.EPSILON)
        layer.weight.data.copy_(weight)
        return layer

    return make


def rotary(size: int, neox: bool) -> Any:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding(HEAD_SIZE, size, POSITIONS, 10000.0, neox, torch.float32)


def attend(window: int | None, soft_cap: float) -> Callable[..., list[Tensor]]:
    from vllm_fl.attention.dense import AttentionFLImpl
    from vllm_fl.attention.metadata import AttentionFLMetadata

    layer = AttentionFLImpl(
        HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, sliding_window=window, logits_soft_cap=soft_cap or None
    )
    table = host_cases.pages()
    width, blocks = max(map(len, table)), max(map(max, table)) + 1
    block_table = torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32)
    kv_cache = torch.zeros(blocks, PAGE, KV_HEADS, 2 * HEAD_SIZE).transpose(1, 2)  # vLLM's order of the axes

    def step(query: Tensor, key: Tensor, value: Tensor, before: list[int], after: list[int]) -> Tensor:
        slots = [
            slot for row, span in enumerate(zip(before, after, strict=True)) for slot in host_cases.slots(row, *span)
        ]
        new = [last - first for first, last in zip(before, after, strict=True)]
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(after, dtype=torch.int32)
        metadata = AttentionFLMetadata(len(slots), max(new), max(after), starts, lengths, block_table, True)
        query, key, value = (x.view(len(slots), -1, HEAD_SIZE) for x in (query, key, value))
        layer.do_kv_cache_update(None, key, value, kv_cache, torch.tensor(slots))
        output = torch.empty_like(query)
        return layer.forward(None, query, key, value, kv_cache, metadata, output).flatten(1)

    def both(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        parts = zip(*(tensor.split((sum(REQUESTS), len(REQUESTS))) for tensor in (query, key, value)), strict=True)
        first, second = list(REQUESTS), [length + 1 for length in REQUESTS]
        spans = (([0] * len(REQUESTS), first), (first, second))
        return [step(*part, *span) for part, span in zip(parts, spans, strict=True)]

    return both


def route(logits: Tensor) -> tuple[Tensor, Tensor]:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    from vllm_fl.layers import routers

    theirs = FusedTopKRouter(top_k=TOPK, global_num_experts=host_cases.EXPERTS, renormalize=True)
    found = routers.route(theirs)
    assert found is not None
    router = routers.RouterFL(theirs, found)
    router.fl_call = bind_op(found.operator)
    return router.select_experts(torch.zeros(len(logits), HIDDEN), logits, topk_indices_dtype=torch.int32)


def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    from vllm_fl.layers.modular_experts import ExpertsFL, refusal

    config = FusedMoEConfig(
        num_experts=len(w13),
        experts_per_token=TOPK,
        hidden_dim=HIDDEN,
        intermediate_size=host_cases.INNER,
        num_local_experts=len(w13),
        num_logical_experts=len(w13),
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=x.dtype,
    )
    assert refusal(config) is None
    layer = ExpertsFL(config, FUSED_MOE_UNQUANTIZED_CONFIG)
    layer.fl_call = bind_op("fused_moe")
    output = torch.empty_like(x)
    layer.apply(output, x, w13, w2, weights, ids, MoEActivation.SILU, len(w13), None, False)
    return output


def main() -> None:
    assert startup.PLATFORM.endswith(type(current_platform).__name__)
    startup.activate()
    load_general_plugins()
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=POSITIONS)
    with set_current_vllm_config(config):
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
    main()
