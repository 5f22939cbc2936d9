"""SGLang's quantization configurations: they read a checkpoint's, and give each linear layer a kind of ours."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.awq import AWQConfig
from sglang.srt.layers.quantization.awq.awq import is_layer_skipped_awq
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.utils import check_equal_or_regex_match, should_ignore_layer
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.gptq import GPTQConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import get_dynamic_override, is_layer_skipped
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_server_args

from .schemes import (
    CHANNEL,
    TENSOR,
    AwqLayer,
    Fp8BlockLayer,
    Fp8Layer,
    Fp8WeightLayer,
    GptqLayer,
    Int8Layer,
    PackedLayer,
    QuantizedMethod,
    Scheme,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = (4, 8)
REORDERED = ("group", "dynamic")
"""The values of ``actorder`` with which columns have groups of their own; others leave the format as it is."""


def refused(what: str) -> ValueError:
    """The error for what a checkpoint has and is not served."""
    return ValueError(f"sglang_fl does not support {what} yet")


class Served:
    """The part that all have in common: models of any dtype, and dense layers only."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    @classmethod
    def get_min_capability(cls) -> int:
        """The least of any GPU."""
        return 0

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer, bound for its prefix; ``None`` for SGLang's own.

        Raises:
            ValueError: quantized experts, a quantized head, or a scheme that is not served, or not on this device.
        """
        if isinstance(layer, FusedMoE):
            raise refused(f"quantized experts ({prefix})")
        if isinstance(layer, ParallelLMHead) and self.fl_quantizes_head(prefix):
            raise refused(f"a quantized head ({prefix})")
        if isinstance(layer, RadixAttention) and self.fl_quantizes_cache():
            raise refused("a KV cache in fp8 that the checkpoint asks for; --kv-cache-dtype may name another type")
        if not isinstance(layer, LinearBase):
            return None
        scheme = self.fl_scheme(layer, prefix)
        if scheme is None:
            return UnquantizedLinearMethod()
        if lacking := scheme.fl_lacking():
            raise refused(f"the weights of {prefix} ({lacking})")
        scheme.fl_bind(prefix)
        layer.scheme = scheme
        return QuantizedMethod(scheme, self)

    def fl_scheme(self, layer: LinearBase, prefix: str) -> Scheme | None:
        """A layer's kind; ``None`` for one that is not quantized."""
        raise NotImplementedError

    def fl_quantizes_head(self, prefix: str) -> bool:
        """Whether the product that gives logits is named as quantized too."""
        return False

    def fl_quantizes_cache(self) -> bool:
        """Whether SGLang will take a cache in fp8, because the checkpoint asks for one and nobody asks for another."""
        wanted = getattr(self, "kv_cache_quant_algo", None) is not None
        return wanted and get_server_args().kv_cache_dtype == "auto"


class Fp8ConfigFL(Served, Fp8Config):
    """``fp8``: dynamic, static, or in blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_checkpoint_fp8_serialized:
            raise refused("'fp8' for a checkpoint that is not quantized")
        if self.use_mxfp8:
            raise refused("quantization 'mxfp8'")

    def fl_scheme(self, layer: LinearBase, prefix: str) -> Scheme | None:
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return None
        if self.weight_block_size is None:
            return Fp8Layer(TENSOR, self.activation_scheme == "static")
        return Fp8BlockLayer(_square(self.weight_block_size))


class CompressedTensorsConfigFL(Served, CompressedTensorsConfig):
    """``compressed-tensors``: weights of 4 bits, and of 8 with inputs of 8 or as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any(found.format != "dense" for found in self.sparsity_scheme_map.values()):
            raise refused("sparse weights of compressed-tensors")

    def fl_scheme(self, layer: LinearBase, prefix: str) -> Scheme | None:
        found = self.get_scheme_dict(layer, prefix)
        return None if not found or found["weights"] is None else _compressed(found, self.quant_format, prefix)

    def fl_quantizes_head(self, prefix: str) -> bool:
        named = check_equal_or_regex_match(layer_name=prefix, targets=list(self.target_scheme_map))
        return named and not should_ignore_layer(prefix, ignore=self.ignore, fused_mapping=self.packed_modules_mapping)


def _compressed(found: Any, usual_format: str, prefix: str) -> Scheme:
    weights, inputs = found["weights"], found["input_activations"]
    form, kind, bits, per = found["format"] or usual_format, weights.type, weights.num_bits, weights.strategy
    packed = form == "pack-quantized" and kind == "int" and bits in BITS and per in (CHANNEL, "group")
    if packed and inputs is None:
        if weights.actorder in REORDERED:
            raise refused(f"compressed-tensors with actorder '{weights.actorder}' ({prefix})")
        return PackedLayer(bits, weights.group_size or -1, not weights.symmetric)
    plain = bits == 8 and weights.symmetric and not weights.dynamic
    given = inputs is not None and not inputs.dynamic
    same = inputs is None or (inputs.num_bits == 8 and inputs.type == weights.type and inputs.symmetric)
    if plain and same and per in (CHANNEL, TENSOR):
        if kind == "int" and inputs is not None:
            return Int8Layer(per, given)
        if kind == "float":
            return Fp8WeightLayer(per, False) if inputs is None else Fp8Layer(per, given)
    if plain and same and kind == "float" and per == "block" and inputs is not None and not given:
        block = _square(weights.block_structure)
        if inputs.strategy == "group" and inputs.group_size == block:
            return Fp8BlockLayer(block)
    rows = "as they are" if inputs is None else f"of {inputs.num_bits} bits"
    raise refused(f"weights of {bits} bits ({kind}, {per}, {form}) for inputs {rows} in compressed-tensors ({prefix})")


class GPTQConfigFL(Served, GPTQConfig):
    """``gptq``: symmetric, 4 and 8 bits."""

    is_symmetric = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GPTQConfigFL:
        made: GPTQConfigFL = super().from_config(config)
        made.is_symmetric = bool(cls.get_from_keys_or(config, ["sym"], True))
        return made

    def fl_scheme(self, layer: LinearBase, prefix: str) -> Scheme | None:
        if get_dynamic_override(self, layer_name=prefix) is False:
            return None
        bits, group, ordered = (
            get_dynamic_override(self, prefix, key, usual)
            for key, usual in (("bits", self.weight_bits), ("group_size", self.group_size), ("desc_act", self.desc_act))
        )
        if bits not in BITS:
            raise refused(f"'gptq' with {bits} bits ({prefix})")
        if not get_dynamic_override(self, prefix, "sym", self.is_symmetric):
            raise refused(f"'gptq' with zero points ({prefix})")
        if ordered and group != -1:
            raise refused(f"'gptq' with desc_act in groups ({prefix})")
        return GptqLayer(bits, group, False)

    def fl_quantizes_head(self, prefix: str) -> bool:
        return bool(self.lm_head_quantized)


class AWQConfigFL(Served, AWQConfig):
    """``awq``: 4 bits."""

    def fl_scheme(self, layer: LinearBase, prefix: str) -> Scheme | None:
        if is_layer_skipped_awq(prefix, self.modules_to_not_convert):
            return None
        if not self.zero_point:
            raise refused(f"'awq' without zero points ({prefix})")
        return AwqLayer(self.weight_bits, self.group_size, True)


def _square(block: Any) -> int:
    down, across = block
    if down != across:
        raise refused(f"blocks of {down} x {across}")
    return int(down)
