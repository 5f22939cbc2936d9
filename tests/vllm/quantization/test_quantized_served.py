"""The layers of each kind of quantized checkpoint that vLLM's plugin serves; see :mod:`quantized_served`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from single_layers import mixture, settings
from torch import nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

import quantized_served
from fl_dispatch.cli import small_model
from fl_dispatch.hosting.quantized.layers import QuantizedLayer
from quantized_served import OWN, SIZE, described
from vllm_fl import quantization
from vllm_fl.quantization.configs import CONFIGS
from vllm_fl.quantization.expert_method import QuantizedMethod

METHODS = {"gptq": "auto_gptq", "awq": "auto_awq", "compressed-tensors": "compressed-tensors"}
KINDS: dict[str, type[nn.Module]] = {
    "linear": RowParallelLinear,
    "joined": MergedColumnParallelLinear,
    "head": ParallelLMHead,
    "embedding": VocabParallelEmbedding,
    "cache": Attention,
}
JOINED = {"gate_up_proj": ["gate_proj", "up_proj"]}


def ask(config: dict[str, Any], kind: str, prefix: str) -> str:
    quant_config: Any = CONFIGS[METHODS.get(config["quant_method"], "fp8")].from_config(config)
    quant_config.packed_modules_mapping = JOINED
    if kind == "experts":
        experts = mixture(quant_config, hidden=SIZE, inner=SIZE)
        method = experts.quant_method
        return described(method.fl_kernel, experts) if isinstance(method, QuantizedMethod) else OWN
    layer: Any = KINDS[kind].__new__(KINDS[kind])
    nn.Module.__init__(layer)
    layer.kv_cache_dtype, layer.tp_size = "fp8", 1
    method = quant_config.get_quant_method(layer, prefix)
    if isinstance(method, BaseKVCacheMethod):
        announced = (getattr(quant_config, "kv_cache_scheme", None) or {}).get("num_bits")
        return "scales of the checkpoint" if announced else OWN
    if method is None or type(method).__name__.startswith("Unquantized"):
        return OWN
    parts = [SIZE, SIZE] if kind == "joined" else [SIZE]
    method.create_weights(layer, SIZE, parts, SIZE, sum(parts), torch.float32, weight_loader=print)
    owners = (method, getattr(layer, "scheme", None))
    found = [value for owner in owners for value in vars(owner or method).values() if isinstance(value, QuantizedLayer)]
    return described(found[0], layer) if found else f"{type(method).__name__}, the host's own"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """vLLM's groups of ranks, with one rank."""
    of_model = settings()
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(of_model):
        patch.setattr(of_model, "model_config", ModelConfig(model=str(small_model.CHECKPOINT), dtype="float32"))
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path / 'meeting'}", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def test_each_layer_of_each_checkpoint_is_served_or_refused_as_recorded(one_rank: None) -> None:
    quantization.register()
    with torch.device("meta"):
        quantized_served.check("vllm", quantized_served.answered(ask))
