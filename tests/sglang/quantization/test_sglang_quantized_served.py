"""The layers of each kind of quantized checkpoint that SGLang's plugin serves; see :mod:`quantized_served`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from single_layers import layer_of, made

import quantized_served
from quantized_served import OWN, SIZE, described


def ask(config: dict[str, Any], kind: str, prefix: str) -> str:
    from sglang.srt.layers import linear, radix_attention, vocab_parallel_embedding
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    from sglang_fl.quantization.cache import CacheScales
    from sglang_fl.quantization.expert_method import QuantizedExpertsMethod
    from sglang_fl.quantization.layers import QuantizedMethod

    with torch.device("meta"):
        quant_config = made(config)
        if kind == "experts":
            sizes = {"num_experts": 2, "top_k": 1, "hidden_size": SIZE, "intermediate_size": SIZE, "layer_id": 0}
            experts = FusedMoE(**sizes, prefix=prefix, params_dtype=torch.float32, quant_config=quant_config)
            method = experts.quant_method
            return described(method.kind, experts) if isinstance(method, QuantizedExpertsMethod) else OWN
        kinds = {
            "linear": linear.RowParallelLinear,
            "joined": linear.MergedColumnParallelLinear,
            "head": vocab_parallel_embedding.ParallelLMHead,
            "embedding": vocab_parallel_embedding.VocabParallelEmbedding,
            "cache": radix_attention.RadixAttention,
        }
        layer = layer_of(kinds[kind])
        method = quant_config.get_quant_method(layer, prefix)
        if isinstance(method, CacheScales):
            return "scales of the checkpoint" if method._announced else OWN
        if not isinstance(method, QuantizedMethod):
            return OWN
        parts = [SIZE, SIZE] if kind == "joined" else [SIZE]
        method.create_weights(layer, SIZE, parts, SIZE, sum(parts), torch.float32, weight_loader=print)
        return described(method.scheme, layer)


def test_each_layer_of_each_checkpoint_is_served_or_refused_as_recorded(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_fl.quantization import configs

    monkeypatch.setattr(configs, "get_server_args", lambda: type("Asked", (), {"kv_cache_dtype": "fp8_e4m3"}))
    quantized_served.check("sglang", quantized_served.answered(ask))
