"""Engines with quantized experts: of a small Qwen3-MoE, and of a DeepSeek-V3 with latent attention.

Their weights are random. All layers of the Qwen3-MoE have experts, and all except one of the DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import Host
from quantized_checkpoints import KIMI_K2, SCHEMES, Scheme, WithIndexer
from quantized_engines import QuantizedEngines, Run
from quantized_network import CHUNK

LAYERS = 2
SHAPE = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_hidden_layers": LAYERS,
}
EXPERTS = (
    "compressed-tensors W8A8 int8",
    "compressed-tensors W8A8 int8, static",
    "compressed-tensors W8A8 fp8",
    "compressed-tensors W8A8 fp8, blocks of 128",
    "compressed-tensors W8A16 fp8",
    "compressed-tensors W4A16",
    "compressed-tensors W4A16, zero points",
    "compressed-tensors W8A16 int8",
    "compressed-tensors W8A16 int8, groups",
    "compressed-tensors W4A8 int8",
    "compressed-tensors W4A8 int8, packed",
    "compressed-tensors MXFP8",
    "compressed-tensors MXFP8A16",
    "compressed-tensors MXFP4",
    "compressed-tensors NVFP4",
    "compressed-tensors MXFP4A16",
    "compressed-tensors NVFP4A16",
    "fp8",
    "fp8, static",
    "fp8, blocks of 128",
    "quark fp8, static",
    "modelopt FP8",
    "modelopt MXFP8",
    "modelopt NVFP4",
    "modelopt W4A16_NVFP4",
    "gptq",
    "gptq, 2 bits",
    "gptq, 3 bits",
    "gptq, 8 bits",
    "awq",
)
"""Schemes with experts that both hosts serve."""
GIVEN = (
    "compressed-tensors W8A8 int8, static",
    "compressed-tensors NVFP4",
    "fp8, static",
    "quark fp8, static",
    "modelopt FP8",
    "modelopt NVFP4",
)
"""Schemes among these with scales of inputs."""
BOTH_KINDS = ("compressed-tensors W8A8 int8", "awq")
"""Schemes for each of the two operators, which run in every kind of engine."""


def mixture(folder: Path, **sizes: Any) -> Path:
    """Write the checkpoint without quantization; ``sizes`` override :data:`SHAPE`."""
    return build_checkpoint("qwen3_moe", folder, **{**SHAPE, **sizes})


LATENT: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # all, because rounding changes close choices
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,  # with the latent part one and a half blocks, as in DeepSeek
    "v_head_dim": 64,
    "qk_head_dim": 128,
    "head_dim": 64,
}
"""Sizes of a DeepSeek-V3 that two ranks divide into whole blocks of 128."""
DEEPSEEK_HEADS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "qk_head_dim": 192,
}
"""Head sizes of DeepSeek-V3 itself, which some kernels require."""
LATENT_LAYERS, LATENT_PRODUCTS = 3, 3 * 6
"""Numbers of its layers, all except one with experts, and of its products, merged as in hosts."""


def latent(folder: Path, **sizes: Any) -> Path:
    """Write a checkpoint with latent attention, experts and a shared expert, not quantized; ``sizes``: changes."""
    return build_checkpoint("deepseek_v3", folder, **{**LATENT, **sizes})


INDEXER: Mapping[str, Any] = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 300}
"""Sizes of an indexer. Only the longest prompt has more tokens than are listed, because rounding changes close
choices there."""


def sparse(folder: Path) -> Path:
    """Write a DeepSeek-V3.2 of the same sizes, with sparse latent attention."""
    return build_checkpoint("deepseek_v32", folder, **{**LATENT, **INDEXER})


def operator(scheme: Scheme) -> str:
    """Return the operator that computes a scheme's experts."""
    return "scaled_moe" if "scaled_linear" in scheme.operators else "weight_only_moe"


def experts_kernel(name: str) -> str:
    """Return our kernel for a scheme's experts."""
    packed = {"gptq": "GptqExperts", "awq": "AwqExperts"}
    return packed.get(name.partition(",")[0]) or SCHEMES[name].layer.replace("Layer", "Experts")


class QuantizedMixtures(QuantizedEngines):
    """The Qwen3-MoE."""

    NEVER = ("fused_moe",)

    def model(self, run: Run, folder: Path) -> Path:
        place = folder / "mixture"
        return place if place.exists() else mixture(place)

    def wrong(self, run: Run) -> Sequence[str]:
        return (operator(run.made),)

    def operators(self, run: Run) -> Sequence[str]:
        return (operator(run.made),)

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        return {experts_kernel(run.scheme): LAYERS}


class QuantizedLatent(QuantizedEngines):
    """The DeepSeek-V3.

    A step with one token uses the absorbed form with the dequantized weight of ``kv_b_proj``, so it does not quantize
    that product's input (:mod:`quantized_network`).
    """

    NEVER = ("fused_moe",)
    ATTENTION: ClassVar[Sequence[str]]
    """Operators of the host's attention."""
    PLAIN: ClassVar[Sequence[str]] = ()
    """Schemes for a model without compressed queries."""

    def model(self, run: Run, folder: Path) -> Path:
        plain = run.scheme in self.PLAIN
        place = folder / ("plain" if plain else "latent")
        return place if place.exists() else latent(place, **({"q_lora_rank": None} if plain else {}))

    def wrong(self, run: Run) -> Sequence[str]:
        return run.made.operators[-1:]

    def operators(self, run: Run) -> Sequence[str]:
        return (*run.made.operators, operator(run.made), *self.ATTENTION)

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        products = host.layers.get(run.scheme, run.made.layer)
        return {products: LATENT_PRODUCTS, experts_kernel(run.scheme): LATENT_LAYERS - 1}


@dataclass(frozen=True, eq=False)
class SparseRun(Run):
    """An engine with a model that has an indexer."""

    @property
    def made(self) -> Scheme:
        return WithIndexer(**vars(SCHEMES[self.scheme]))


class QuantizedSparse(QuantizedLatent):
    """The DeepSeek-V3.2 with one request at a time, so that no other request decides whether a step lists tokens."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {"max_num_seqs": 1, "max_num_batched_tokens": CHUNK}
    OF_INDEXER: ClassVar[int] = 1
    """Its quantized products: of queries, and where a host does not dequantize their weight of keys."""

    def model(self, run: Run, folder: Path) -> Path:
        place = folder / "sparse"
        return place if place.exists() else sparse(place)

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        products = host.layers.get(run.scheme, run.made.layer)
        return {**super().counted(run, host), products: LATENT_PRODUCTS + LATENT_LAYERS * self.OF_INDEXER}


@dataclass(frozen=True, eq=False)
class KimiRun(Run):
    """An engine with the checkpoint of :data:`KIMI_K2`."""

    scheme: str = "compressed-tensors W4A16"
    kind: str = "experts alone"

    @property
    def made(self) -> Scheme:
        return KIMI_K2


class KimiK2(QuantizedLatent):
    """The DeepSeek-V3 with only its experts quantized."""

    ALONE = [KimiRun()]
    RUNS = ALONE

    def wrong(self, run: Run) -> Sequence[str]:
        return ("weight_only_moe",)

    def operators(self, run: Run) -> Sequence[str]:
        return ("weight_only_moe", *self.ATTENTION)

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        return {"PackedExperts": LATENT_LAYERS - 1}
