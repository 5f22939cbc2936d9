"""Layers of vLLM in this process, without an engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

MIXTURE = "model.layers.0.mlp.experts"


@cache
def settings() -> VllmConfig:
    """Those that vLLM has without a model."""
    return VllmConfig()


def mixture(
    config: Any,
    count: int = 2,
    hidden: int = 64,
    inner: int = 64,
    kind: type[RoutedExperts] = RoutedExperts,
    **parallel: Any,
) -> Any:
    """vLLM's layer of experts, built with a checkpoint's configuration; ``parallel``: this rank's place."""
    place = replace(FusedMoEParallelConfig.make_no_parallel(), **parallel)
    places = ExpertMapManager(8, 1, count, 0, None, place, "linear", enable_eplb=False)
    moe = FusedMoEConfig(
        num_experts=count,
        experts_per_token=1,
        hidden_dim=hidden,
        intermediate_size=inner,
        num_local_experts=places.local_num_experts,
        num_logical_experts=count,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=place,
        in_dtype=torch.float32,
    )
    with set_current_vllm_config(settings()):
        return kind(MIXTURE, torch.float32, moe, config, places)
