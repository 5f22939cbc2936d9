"""SGLang's quantization configurations: they read a checkpoint's, and give linear layers and experts a kind of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.awq import AWQConfig
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.gptq import GPTQConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_server_args

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.quantized import blocks, joined, orders, remedies
from fl_dispatch.hosting.quantized.experts import OPERATORS, QuantizedExperts
from fl_dispatch.hosting.start.first_choices import without_graphs

from . import FP8_CACHE, experts, latent, refused, schemes
from .cache import CacheScales
from .experts import QuantizedExpertsMethod
from .schemes import CHANNEL, TENSOR, QuantizedMethod

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = (4, 8)
UNREAD = ("transform_config", "linear_fp8_config")
"""Parts of a checkpoint's configuration that SGLang drops, or computes by layers of its own."""


@dataclass(frozen=True)
class Kinds:
    """The classes that compute each kind of weights: those of linear layers, or those of experts.

    Args:
        weights: their name in sentences.
        int8, fp8: called with whose scale a scale is, and whether inputs have a given one.
        fp8_weight: likewise, for inputs as they are.
        blocks: called with the size of blocks; ``compressed_blocks`` for those in ``compressed-tensors``.
        packed, gptq, awq: called with bits, groups, and whether zero points count.
    """

    weights: str
    int8: Callable[[str, bool], Any]
    fp8: Callable[[str, bool], Any]
    fp8_weight: Callable[[str, bool], Any] | None
    blocks: Callable[[int], Any]
    compressed_blocks: Callable[[int], Any] | None
    packed: Callable[[int, int, bool], Any]
    gptq: Callable[[int, int, bool], Any]
    awq: Callable[[int, int, bool], Any]


LINEAR = Kinds(
    weights="weights",
    int8=schemes.Int8Layer,
    fp8=schemes.Fp8Layer,
    fp8_weight=schemes.Fp8WeightLayer,
    blocks=schemes.Fp8BlockLayer,
    compressed_blocks=schemes.Fp8BlockLayer,
    packed=schemes.PackedLayer,
    gptq=schemes.GptqLayer,
    awq=schemes.AwqLayer,
)
EXPERTS = Kinds(
    weights="experts with weights",
    int8=experts.Int8Experts,
    fp8=experts.Fp8Experts,
    fp8_weight=None,
    blocks=experts.Fp8BlockExperts,
    compressed_blocks=None,
    packed=experts.PackedExperts,
    gptq=experts.GptqExperts,
    awq=experts.AwqExperts,
)


class Served:
    """The part that all have in common: models of any dtype."""

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
            ValueError: a quantized head or cache, or a kind of weights, that is not served, or not on this device.
        """
        if isinstance(layer, ParallelLMHead) and self.fl_quantizes_head(prefix):
            raise refused(f"a quantized head ({prefix})")
        if isinstance(layer, RadixAttention):
            return self._cache_method(prefix)
        if isinstance(layer, FusedMoE):
            kind = self._bound(self.fl_kind(layer, prefix, EXPERTS), prefix)
            return None if kind is None else QuantizedExpertsMethod(kind, self)
        if not isinstance(layer, LinearBase):
            return None
        scheme = self._bound(self.fl_kind(layer, prefix, LINEAR), prefix)
        if scheme is None:
            return UnquantizedLinearMethod()
        if why := latent.refusal(scheme, prefix.rpartition(".")[2]):
            raise refused(f"{why} ({prefix})")
        layer.scheme = scheme
        return QuantizedMethod(scheme, self)

    def _cache_method(self, prefix: str) -> CacheScales | None:
        """The method that loads scales of keys and values, if the cache is in fp8."""
        given, scheme = get_server_args().kv_cache_dtype, getattr(self, "kv_cache_scheme", None) or {}
        if given != FP8_CACHE and not (given == "auto" and self.fl_quantizes_cache()):
            return None
        if scheme.get("strategy") == "attn_head":
            raise refused(f"{remedies.SCALE_A_HEAD} ({prefix})", remedies.HEADS)
        if not (device := detect_device()).float8:
            wanted = f"the KV cache in fp8 that the checkpoint asks for on {device.name}"
            raise refused(f"{wanted} (--kv-cache-dtype may name another type)")
        return CacheScales(self, self.fl_quantizes_cache(), prefix)

    @staticmethod
    def _bound(kind: Any, prefix: str) -> Any:
        if kind is None:
            return None
        device = detect_device()
        if isinstance(kind, QuantizedExperts) and device.accelerator and without_graphs(OPERATORS):
            raise refused(
                f"quantized experts on {device.name} where their references, which wait for it, come first ({prefix})"
            )
        if lacking := kind.fl_lacking():
            raise refused(f"the weights of {prefix} ({lacking})")
        kind.fl_bind(prefix)
        return kind

    def fl_kind(self, layer: Any, prefix: str, kinds: Kinds) -> Any:
        """An object that computes a linear layer or experts; ``None`` where they are not quantized."""
        raise NotImplementedError

    def fl_quantizes_head(self, prefix: str) -> bool:
        """Whether the product that gives logits is named as quantized too."""
        return False

    def fl_quantizes_cache(self) -> bool:
        """Whether the checkpoint has scales for a cache in fp8, so that SGLang takes one where nobody names another."""
        algorithm = getattr(self, "kv_cache_quant_algo", None)
        return isinstance(algorithm, str) and algorithm.upper() == "FP8"


class Fp8ConfigFL(Served, Fp8Config):
    """``fp8``: dynamic, static, or in blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_checkpoint_fp8_serialized:
            raise refused("'fp8' for a checkpoint that is not quantized")
        if self.use_mxfp8:
            raise refused("quantization 'mxfp8'")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8ConfigFL:
        blocks.warn_of_powers_of_two(config)
        made: Fp8ConfigFL = super().from_config(config)
        return made

    def fl_kind(self, layer: Any, prefix: str, kinds: Kinds) -> Any:
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return None
        if self.weight_block_size is None:
            return kinds.fp8(TENSOR, self.activation_scheme == "static")
        return kinds.blocks(_square(self.weight_block_size))


class CompressedTensorsConfigFL(Served, CompressedTensorsConfig):
    """``compressed-tensors``: weights of 4 bits, and of 8 with inputs of 8 or as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any(found.format != "dense" for found in self.sparsity_scheme_map.values()):
            raise refused("sparse weights of compressed-tensors")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfigFL:
        for key in UNREAD:
            if config.get(key):
                raise refused(f"compressed-tensors with '{key}'")
        made: CompressedTensorsConfigFL = super().from_config(config)
        return made

    def fl_kind(self, layer: Any, prefix: str, kinds: Kinds) -> Any:
        found = self._products(layer, prefix) if kinds is EXPERTS else self._scheme(layer, prefix)
        return None if not found or found["weights"] is None else _compressed(found, self.quant_format, prefix, kinds)

    def _scheme(self, layer: Any, prefix: str) -> Mapping[str, Any]:
        """The scheme of a layer by the library's rules: names and expressions before classes; empty for none.

        SGLang knows the parts of joined layers for some models alone, and takes plain names for ends of names.
        """
        parts = joined.names_of_parts(prefix, self.packed_modules_mapping)
        owner = type(layer).__name__.lower()
        classes = (self.target_scheme_map[target] for target in self._targets() if target.lower() in owner)
        return joined.agreed(self._named, prefix, parts, next(classes, {}), _scheme_in_words, refused)

    def _targets(self) -> list[str]:
        """The targets in the library's order."""
        return sorted(self.target_scheme_map, key=lambda target: (target.startswith(EXPRESSION), target))

    def _named(self, name: str) -> Mapping[str, Any] | None:
        """A layer's scheme by its name: an empty one where it is ignored, and ``None`` if nothing names it."""
        if any(_matches(name, target) for target in self.ignore):
            return {}
        return next((self.target_scheme_map[target] for target in self._targets() if _matches(name, target)), None)

    def _products(self, layer: Any, prefix: str) -> Any:
        """The scheme of the products of a layer's experts, which must be the same."""
        self._add_fused_moe_to_target_scheme_map()
        names = (f"{prefix}.0.{product}" for product in ("gate_proj", "up_proj", "down_proj"))
        found, *others = (self._scheme(layer, name) for name in names)
        if any(other != found for other in others):
            raise refused(f"experts whose products differ in their scheme ({prefix})")
        return found

    def fl_quantizes_head(self, prefix: str) -> bool:
        return bool(self._named(prefix))


EXPRESSION = "re:"
"""The beginning of a target that is a regular expression; others are names, or classes."""
ROOTS = ("model", "language_model")
"""Modules around a model's layers, which checkpoints and hosts have in different orders."""


def _matches(name: str, target: str) -> bool:
    """Whether a target means the layer with this name: the whole of it, or an expression from its start on."""
    if target.startswith(EXPRESSION):
        return re.match(target.removeprefix(EXPRESSION), name) is not None
    return _below_roots(target) == _below_roots(name)


def _below_roots(name: str) -> str:
    parts = name.split(".")
    while parts[0] in ROOTS and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts)


def _scheme_in_words(scheme: Mapping[str, Any]) -> str:
    weights = scheme.get("weights")
    return "not quantized" if weights is None else f"{weights.num_bits} bits ({weights.type}, {weights.strategy})"


def _compressed(found: Any, usual_format: str, prefix: str, kinds: Kinds) -> Any:
    weights, inputs = found["weights"], found["input_activations"]
    form, kind, bits, per = found["format"] or usual_format, weights.type, weights.num_bits, weights.strategy
    packed = form == "pack-quantized" and kind == "int" and bits in BITS and per in (CHANNEL, "group")
    if packed and inputs is None:
        if weights.actorder in orders.REORDERED:
            raise refused(f"compressed-tensors with actorder '{weights.actorder}' ({prefix})", remedies.ORDER)
        return kinds.packed(bits, weights.group_size or -1, not weights.symmetric)
    plain = bits == 8 and weights.symmetric and not weights.dynamic
    given = inputs is not None and not inputs.dynamic
    same = inputs is None or (inputs.num_bits == 8 and inputs.type == weights.type and inputs.symmetric)
    if plain and same and per in (CHANNEL, TENSOR):
        if kind == "int" and inputs is not None:
            return kinds.int8(per, given)
        if kind == "float" and inputs is not None:
            return kinds.fp8(per, given)
        if kind == "float" and kinds.fp8_weight is not None:
            return kinds.fp8_weight(per, False)
    blocks = plain and same and kind == "float" and per == "block" and inputs is not None and not given
    if blocks and kinds.compressed_blocks is not None:
        block = _square(weights.block_structure)
        if inputs.strategy == "group" and inputs.group_size == block:
            return kinds.compressed_blocks(block)
    rows = "as they are" if inputs is None else f"of {inputs.num_bits} bits"
    what = f"{kinds.weights} of {bits} bits ({kind}, {per}, {form}) for inputs {rows}"
    raise refused(f"{what} in compressed-tensors ({prefix})")


class GPTQConfigFL(Served, GPTQConfig):
    """``gptq``: symmetric, 4 and 8 bits."""

    is_symmetric = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GPTQConfigFL:
        made: GPTQConfigFL = super().from_config(config)
        made.is_symmetric = bool(cls.get_from_keys_or(config, ["sym"], True))
        return made

    def fl_kind(self, layer: Any, prefix: str, kinds: Kinds) -> Any:
        names = (f"{prefix}.0.{product}" for product in ("gate_proj", "up_proj", "down_proj"))
        parts = list(names) if kinds is EXPERTS else joined.names_of_parts(prefix, self.packed_modules_mapping)
        usual: tuple[Any, ...] = (self.weight_bits, self.group_size, self.desc_act, self.is_symmetric)
        found = joined.agreed(self._named, prefix, parts, usual, _packing_in_words, refused)
        if not found:
            return None
        bits, group, ordered, symmetric = found
        if bits not in BITS:
            raise refused(f"'gptq' with {bits} bits ({prefix})", remedies.BITS)
        if not symmetric:
            raise refused(f"'gptq' with zero points ({prefix})", remedies.ZERO_POINTS)
        if ordered and group != -1:
            raise refused(f"'gptq' with desc_act in groups ({prefix})", remedies.COLUMNS)
        return kinds.gptq(bits, group, False)

    def _named(self, name: str) -> tuple[Any, ...] | None:
        """Bits, group, order and symmetry of a layer that ``dynamic`` names; empty if it is left as it is."""
        for pattern, changed in self.dynamic.items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
                usual = {"bits": self.weight_bits, "group_size": self.group_size, "desc_act": self.desc_act}
                values = {**usual, "sym": self.is_symmetric, **changed}
                return () if pattern.startswith("-:") else tuple(values[key] for key in (*usual, "sym"))
        return None

    def fl_quantizes_head(self, prefix: str) -> bool:
        return bool(self.lm_head_quantized)


def _packing_in_words(found: tuple[Any, ...]) -> str:
    return f"{found[0]} bits in groups of {found[1]}" if found else joined.left(True)


class AWQConfigFL(Served, AWQConfig):
    """``awq``: 4 bits."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AWQConfigFL:
        if (version := str(config.get("version", "")).lower()) in remedies.UNUSUAL_VERSIONS:
            raise refused(f"'awq' of version '{version}'", remedies.VERSION)
        made: AWQConfigFL = super().from_config(config)
        return made

    def fl_kind(self, layer: Any, prefix: str, kinds: Kinds) -> Any:
        parts = [] if kinds is EXPERTS else joined.names_of_parts(prefix, self.packed_modules_mapping)
        if joined.agreed(self._named, prefix, parts, usual=False, said=joined.left, refused=refused):
            return None
        if not self.zero_point:
            raise refused(f"'awq' without zero points ({prefix})")
        if kinds is EXPERTS and self.group_size <= 0:
            raise refused(f"experts quantized by 'awq' without groups ({prefix})")
        return kinds.awq(self.weight_bits, self.group_size, True)

    def _named(self, name: str) -> bool | None:
        """Whether a part of a layer's name is among those that are left as they are; ``None`` if not."""
        return any(part in name for part in self.modules_to_not_convert or ()) or None


def _square(block: Any) -> int:
    down, across = block
    if down != across:
        raise refused(f"blocks of {down} x {across}")
    return int(down)
