"""Layers of vLLM in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention, mla_attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from fl_dispatch.cli import small_model
from fl_dispatch.hosting.quantized.layers import QuantizedLayer
from quantized_served import JOINED, LAYERS, SIZE
from single_quantized import COUNT, MIXTURE
from vllm_fl import quantization
from vllm_fl.attention import mla_weight
from vllm_fl.quantization import SERVED, configs
from vllm_fl.quantization.expert_method import QuantizedMethod

METHODS = {
    "auto-round": "inc",
    "gptq": "auto_gptq",
    "awq": "auto_awq",
    "compressed-tensors": "compressed-tensors",
    "quark": "quark",
}
KINDS: Mapping[str, type[nn.Module]] = {
    "linear": RowParallelLinear,
    "joined": MergedColumnParallelLinear,
    "head": ParallelLMHead,
    "embedding": VocabParallelEmbedding,
    "cache": Attention,
}


@cache
def settings() -> VllmConfig:
    """Those that vLLM has without a model."""
    return VllmConfig()


def made(said: Mapping[str, Any]) -> Any:
    """vLLM's configuration object of a checkpoint's."""
    method = METHODS.get(said["quant_method"], "fp8")
    if said["quant_method"] == "modelopt":
        method = {"MXFP8": "modelopt_mxfp8"}.get(said["quant_algo"], "modelopt")
        method = "modelopt_fp4" if "FP4" in said["quant_algo"] else method
    found: Any = getattr(configs, SERVED[method].config).from_config(dict(said))
    found.packed_modules_mapping = JOINED
    return found


def mixture(
    config: Any,
    count: int = COUNT,
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


class LayersOfVLLM:
    """A :class:`Layers`."""

    name = "vllm"

    def __init__(self) -> None:
        self.kv_cache_dtype = "fp8"

    def config(self, said: Mapping[str, Any]) -> Any:
        return made(said)

    def layer(self, kind: str) -> Any:
        layer: Any = KINDS[kind].__new__(KINDS[kind])
        nn.Module.__init__(layer)
        layer.prefix, layer.kv_cache_dtype, layer.tp_size = LAYERS[kind], self.kv_cache_dtype, 1
        return layer

    def linear_kernel(self, method: Any, layer: Any) -> Any:
        owners = (method, getattr(layer, "scheme", None) or method)
        found = [value for owner in owners for value in vars(owner).values() if isinstance(value, QuantizedLayer)]
        return found[0] if found else f"{type(method).__name__}, the host's own"

    def absorbed(self, layer: Any, method: Any) -> Tensor:
        mla_weight.ask_exactly()
        layer.quant_method, layer.input_size_per_partition = method, SIZE
        return mla_attention.get_and_maybe_dequant_weights(layer)

    def has_scales(self, config: Any, method: Any) -> bool:
        announced = (getattr(config, "kv_cache_scheme", None) or {}).get("num_bits")
        return isinstance(method, BaseKVCacheMethod) and bool(announced)

    def mixture(self, said: Mapping[str, Any], hidden: int, inner: int, ranks: int = 1, rank: int = 0) -> Any:
        return mixture(made(said), hidden=hidden, inner=inner, tp_size=ranks, tp_rank=rank)

    def experts_kernel(self, layer: Any) -> Any:
        method = layer.quant_method
        return method.fl_kernel if isinstance(method, QuantizedMethod) else None

    def computed(self, layer: Any, x: Tensor, expert: int) -> Tensor:
        routing = (torch.ones(len(x), 1), torch.full((len(x), 1), expert, dtype=torch.int32), "silu", False, None)
        found: Tensor = layer.quant_method.fl_kernel.apply_experts(layer, x, *routing, None)
        return found


@contextmanager
def one_rank(folder: Path) -> Iterator[LayersOfVLLM]:
    """vLLM's groups of ranks, with one rank, and its configuration of the small model."""
    of_model = settings()
    quantization.register()
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(of_model):
        patch.setattr(of_model, "model_config", ModelConfig(model=str(small_model.CHECKPOINT), dtype="float32"))
        parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'meeting'}", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield LayersOfVLLM()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
