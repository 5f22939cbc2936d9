"""SGLang's layers over our operators: one row per class, and one module per family.

SGLang asks each layer once for its forward function. A layer gets the bridge of the first class in its method
resolution order with a row; the search ends at a class with its own computation (``forward_native`` and so on) and no
row. A class that only wraps ``forward`` and calls its base's is bridged inside that wrapper.

Some classes replace ``forward`` itself and are never asked. Their rows say so, and the function is hooked instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Signature, signature

from fl_dispatch.hosting.facts.fact import HostFact

from .activations import ActivationBridge, XIELUBridge, activation_bridge
from .base import Bridge, Unbridged, fallen_through
from .fused_moe import FusedMoEBridge
from .layer_norm import LayerNormBridge
from .rms_norm import (
    FusedGatedRMSNormBridge,
    GatedRMSNormBridge,
    Gemma3RMSNormBridge,
    Gemma4RMSNormBridge,
    GemmaRMSNormBridge,
    RMSNormBridge,
    StateSpaceNormBridge,
    UnscaledRMSNormBridge,
)
from .rotary_embedding import BailingRotaryBridge, ErnieRotaryBridge, LongRopeBridge, MRotaryBridge, RotaryBridge
from .states import ChannelsBridge, DeltaNetBridge, ShortConvBridge, StateSpaceBridge
from .topk import TopKBridge

__all__ = ["BRIDGES", "NATIVE", "PENDING", "ROWS", "STATES", "Bridge", "Row", "Unbridged", "fallen_through", "find"]

_LAYERS = "sglang.srt.layers"
_ROPE = f"{_LAYERS}.rotary_embedding"
_LINEAR = "sglang.kernels.ops.attention.fla"
_MAMBA = f"{_LAYERS}.attention.mamba"


@dataclass(frozen=True)
class Row:
    """One class of SGLang and its bridge.

    Args:
        module, name: the class's module and name.
        bridge: the bridge that runs instead.
        own_forward: whether the class replaces ``forward`` itself, so that SGLang never asks it for a function.
    """

    module: str
    name: str
    bridge: type[Bridge]
    own_forward: bool = False

    @property
    def facts(self) -> tuple[HostFact, ...]:
        """Return the facts that the bridge relies on: the class with its forward, an activation's attributes."""
        owner, user = f"{self.module}:{self.name}", self.bridge.__module__.removeprefix("sglang_fl.")
        read = self.bridge.activation.facts(owner, user) if issubclass(self.bridge, ActivationBridge) else ()
        _, *parameters = (p.replace(annotation=p.empty) for p in signature(self.bridge.forward).parameters.values())
        name = "forward" if self.own_forward else "forward_native"
        forward = f"{name}{Signature(parameters)}"
        return HostFact(owner, (forward,), "replaces", user, "The layer would run SGLang's own code."), *read


BRIDGES = (
    Row(f"{_LAYERS}.layernorm", "RMSNorm", RMSNormBridge),
    Row(f"{_LAYERS}.layernorm", "RMSNormWithoutScale", UnscaledRMSNormBridge),
    Row(f"{_LAYERS}.layernorm", "GemmaRMSNorm", GemmaRMSNormBridge),
    Row(f"{_LAYERS}.layernorm", "Gemma3RMSNorm", Gemma3RMSNormBridge),
    Row(f"{_LAYERS}.layernorm", "Gemma4RMSNorm", Gemma4RMSNormBridge),
    Row(f"{_LAYERS}.layernorm", "LayerNorm", LayerNormBridge),
    *(
        Row(f"{_LAYERS}.activation", name, activation_bridge(name))
        for name in ("SiluAndMul", "SituAndMul", "GeluAndMul", "NewGELU", "ReLU2", "QuickGELU")
    ),
    Row(f"{_LAYERS}.activation", "XIELU", XIELUBridge, own_forward=True),
    Row(f"{_ROPE}.base", "RotaryEmbedding", RotaryBridge),
    Row(f"{_ROPE}.rope_variant", "DeepseekScalingRotaryEmbedding", RotaryBridge),
    Row(f"{_ROPE}.rope_variant", "Phi3LongRoPEScaledRotaryEmbedding", LongRopeBridge, own_forward=True),
    Row(f"{_ROPE}.mrope", "MRotaryEmbedding", MRotaryBridge),
    Row(f"{_ROPE}.mrope", "Ernie4_5_VLRotaryEmbedding", ErnieRotaryBridge, own_forward=True),
    Row(f"{_ROPE}.bailing_mrope", "BailingMRotaryEmbedding", BailingRotaryBridge, own_forward=True),
    Row(f"{_MAMBA}.mixer2_rms_norm_gated", "Mixer2RMSNormGated", StateSpaceNormBridge),
    Row(f"{_LAYERS}.moe.topk", "TopK", TopKBridge),
    Row(f"{_LAYERS}.quantization.unquant", "UnquantizedFusedMoEMethod", FusedMoEBridge),
)

STATES = (
    Row(f"{_LAYERS}.radix_linear_attention", "RadixLinearAttention", DeltaNetBridge, own_forward=True),
    Row(f"{_LINEAR}.layernorm_gated", "RMSNorm", GatedRMSNormBridge, own_forward=True),
    Row(f"{_LINEAR}.fused_norm_gate", "FusedRMSNormGated", FusedGatedRMSNormBridge, own_forward=True),
    Row(f"{_MAMBA}.mamba", "MambaMixer2", StateSpaceBridge, own_forward=True),
    Row(f"{_MAMBA}.mamba1", "MambaMixer1", ChannelsBridge, own_forward=True),
    Row("sglang.srt.models.lfm2", "Lfm2ShortConv", ShortConvBridge, own_forward=True),
    Row("sglang.srt.models.lfm2_moe", "Lfm2MoeShortConv", ShortConvBridge, own_forward=True),
)
"""Layers with a state and the norms after them, for which SGLang has kernels only on its own devices."""
ROWS = (*BRIDGES, *STATES)

_BEHIND_A_FUNCTION = "a kernel behind a function, not a layer; layers that call it in their own forward are ours"
_FUSED = "several layers in one kernel; there is no operator for it"

NATIVE = {
    "Llama4VisionRotaryEmbedding": "rotates by complex numbers, without positions",
    "DualChunkRotaryEmbedding": "rotates a query five times",
    "Conv2dLayer": "a convolution; there is no operator for it",
    "Conv3dLayer": "a convolution; there is no operator for it",
    "Compressor": "compressed sparse attention; there is no operator for it",
    "Indexer": "its layers get an indexer of the plugin's own",
    "IndexerKPool": "sparse attention; there is no operator for it",
    "QSAIndexer": "sparse attention; there is no operator for it",
    "CompressorHip": "compressed sparse attention; there is no operator for it",
    "MultiPlatformOp": "a base class, which computes nothing",
    "_GatedActivationOp": "a base class, which computes nothing",
    "SiluAndMulOp": _BEHIND_A_FUNCTION,
    "GeluAndMulOp": _BEHIND_A_FUNCTION,
    "GeluTanhAndMulOp": _BEHIND_A_FUNCTION,
    "ReLU2Op": _BEHIND_A_FUNCTION,
    "QuickGELUOp": _BEHIND_A_FUNCTION,
    "RMSNormOp": _BEHIND_A_FUNCTION,
    "FusedAddRMSNormOp": _BEHIND_A_FUNCTION,
    "GemmaRMSNormOp": _BEHIND_A_FUNCTION,
    "GemmaFusedAddRMSNormOp": _BEHIND_A_FUNCTION,
    "ClampPositionOp": "positions of a batch, which no layer computes",
    "Fp8ScaledMMOp": "a kernel behind a function; fp8 layers multiply by scaled_linear",
    "_FusedNormFP4Quant": "a norm that also quantizes its result to NVFP4; there is no operator for it",
    "BeamAttentionGateOp": "a gate of attention's output; there is no operator for it",
    "FusedPostExpertNormWeightedSumTRTLLM": "experts with a norm behind each; there is no operator for it",
    "BeamSandwichResidualRMSNormOp": _FUSED,
    "FusedPostNormResidualPreNorm": _FUSED,
    "FusedQKNorm": _FUSED,
    "sglang.multimodal_gen": "models that make images and videos; they are not served",
}
"""Classes, or all classes of a module, that stay SGLang's, and why."""

PENDING = {
    "FusedMuseSparkRouting": "its routing could run grouped_topk with a bias; its model calls it as a function",
    "FusedRMSNormGate": "with its norm it could run rms_norm_gated; its model also uses it without one",
}
"""Classes that could run our operators but do not yet, and the missing part."""

_TABLE = {(row.module, row.name): row for row in ROWS}


def find(layer_class: type) -> Row | None:
    """Return the row of a layer's class, or ``None`` if SGLang's own code must run."""
    for base in layer_class.__mro__:
        row = _TABLE.get((base.__module__, base.__name__))
        if row is not None:
            return row
        if base.__name__ in NATIVE or any(name.startswith("forward_") for name in vars(base)):
            return None
    return None
