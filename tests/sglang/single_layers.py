"""Layers and arguments of SGLang in this process, without an engine; tests that use them ask for ``scheduler``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantized_served import SIZE
from single_quantized import COUNT, MIXTURE, PREFIX

__all__ = ["MIXTURE", "PREFIX"]


def made(config: Mapping[str, Any]) -> Any:
    """The configuration of a checkpoint."""
    from sglang_fl.quantization import SERVED, config_class

    method = config["quant_method"] if config["quant_method"] in SERVED else "fp8"
    if config["quant_method"] == "modelopt":
        method = {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"}.get(config["quant_algo"], "modelopt_fp4")
    found = config_class(method)
    assert found is not None
    return found.from_config(dict(config))  # type: ignore[attr-defined]


def layer_of(cls: type[nn.Module]) -> Any:
    """A layer of SGLang's that its constructor has not filled."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    return layer


def linear() -> Any:
    """A row-parallel product."""
    from sglang.srt.layers.linear import RowParallelLinear

    return layer_of(RowParallelLinear)


def mixture(config: Mapping[str, Any], hidden: int = SIZE, inner: int = SIZE, **options: Any) -> Any:
    """SGLang's layer of experts, built with a checkpoint's configuration."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    kind = options.pop("kind", FusedMoE)
    given = {"top_k": 1, "num_experts": COUNT, "hidden_size": hidden, "intermediate_size": inner, "layer_id": 0}
    return kind(**given, prefix=MIXTURE, params_dtype=torch.float32, quant_config=made(config), **options)


class LayersOfSGLang:
    """A :class:`Layers`."""

    name = "sglang"

    def __init__(self) -> None:
        self.kv_cache_dtype = "fp8_e4m3"

    def config(self, said: Mapping[str, Any]) -> Any:
        return made(said)

    def layer(self, kind: str) -> Any:
        from sglang.srt.layers import linear, radix_attention, vocab_parallel_embedding

        kinds = {
            "linear": linear.RowParallelLinear,
            "joined": linear.MergedColumnParallelLinear,
            "head": vocab_parallel_embedding.ParallelLMHead,
            "embedding": vocab_parallel_embedding.VocabParallelEmbedding,
            "cache": radix_attention.RadixAttention,
        }
        return layer_of(kinds[kind])

    def linear_kernel(self, method: Any, layer: Any) -> Any:
        return method.scheme

    def absorbed(self, layer: Any, method: Any) -> Tensor:
        from sglang_fl.quantization import latent

        attention: Any = nn.Module()
        attention.kv_b_proj, layer.params_dtype = layer, torch.float32
        attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim = SIZE, SIZE // 4, SIZE // 4
        latent.split(nn.ModuleDict({"attention": attention}))
        return torch.cat((attention.w_kc, attention.w_vc.transpose(1, 2)), 1).flatten(0, 1)

    def has_scales(self, config: Any, method: Any) -> bool:
        return method is not None and method._announced

    def mixture(self, said: Mapping[str, Any], hidden: int, inner: int, ranks: int = 1, rank: int = 0) -> Any:
        layer = mixture(said, hidden, inner // ranks)
        layer.moe_tp_size, layer.moe_tp_rank = ranks, rank
        return layer

    def experts_kernel(self, layer: Any) -> Any:
        from sglang_fl.quantization.expert_method import QuantizedExpertsMethod

        method = layer.quant_method
        return method.kind if isinstance(method, QuantizedExpertsMethod) else None

    def computed(self, layer: Any, x: Tensor, expert: int) -> Tensor:
        from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        ids = torch.full((len(x), 1), expert, dtype=torch.int32)
        routed = StandardTopKOutput(torch.ones(len(x), 1), ids, torch.zeros(len(x), COUNT))
        found: Tensor = layer.quant_method.apply(layer, StandardDispatchOutput(x, None, routed)).hidden_states
        return found


def asked_of_sglang(given: dict[str, Any]) -> Any:
    """SGLang's arguments, with what a user gives."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="m", device="cpu")
    for name, value in given.items():
        setattr(args, name, value)
    return args
