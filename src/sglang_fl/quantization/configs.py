"""SGLang's quantization configurations: they read a checkpoint's, and assign our kinds to layers and experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
from sglang.srt.layers.quantization.awq import AWQConfig
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    QuantizationArgs,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.gptq import GPTQConfig
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptFp8Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.quark.quark import QuarkConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_server_args

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.quantized import auto_round, layer_parts, quark, remedies, schemes, stored_experts
from fl_dispatch.hosting.quantized.configurations import check
from fl_dispatch.hosting.quantized.experts import OPERATORS, QuantizedExperts
from fl_dispatch.hosting.quantized.layers import DTYPES
from fl_dispatch.hosting.quantized.schemes import EXPRESSION, LEFT, Scheme
from fl_dispatch.hosting.start.first_choices import without_graphs

from . import FP8_CACHE, latent, layers, refused
from .cache import CacheScales
from .expert_method import QuantizedExpertsMethod
from .layers import QuantizedMethod

PRODUCTS = ("gate_proj", "up_proj", "down_proj")
"""The products of an expert, as checkpoints name them."""


class Served:
    """The common part of all: models of any dtype."""

    fl_format: str
    """The format's name in checkpoints."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the smallest capability of any GPU."""
        return 0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        check(cls.fl_format, config, refused)
        return super().from_config(config)  # type: ignore[misc]

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of a layer, bound for its prefix; ``None`` for SGLang's own.

        Raises:
            ValueError: a quantized head or cache, or a kind of weights, is not served, or not on this device.
        """
        if isinstance(layer, ParallelLMHead) and self.fl_quantizes_head(prefix):
            raise refused(f"a quantized head ({prefix})")
        if isinstance(layer, RadixAttention):
            return self._cache_method(prefix)
        of_experts = isinstance(layer, FusedMoE)
        if not of_experts and not isinstance(layer, LinearBase):
            return None
        scheme = self.fl_scheme(layer, prefix)
        if isinstance(scheme, str):
            return None if of_experts else UnquantizedLinearMethod()
        kind = schemes.served(scheme, prefix, refused, experts=of_experts)
        if of_experts:
            return QuantizedExpertsMethod(self._bound(stored_experts.KINDS[kind](scheme), prefix), self)
        layer.scheme = self._bound(layers.KINDS[kind](scheme), prefix)
        if why := latent.refusal(layer.scheme, prefix.rpartition(".")[2]):
            raise refused(f"{why} ({prefix})")
        return QuantizedMethod(layer.scheme, self)

    def get_cache_scale(self, name: str) -> str | None:
        """Return the model's name for a scale of the cache, which Granite asks for."""
        asked = getattr(super(), "get_cache_scale", None)
        return asked(name) if asked else None

    def _cache_method(self, prefix: str) -> CacheScales | None:
        """Return the method that loads scales of keys and values, if the cache is in fp8."""
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
        """Bind a kind of layer or experts for a prefix, or refuse what this device lacks."""
        device = detect_device()
        if isinstance(kind, QuantizedExperts) and device.accelerator and without_graphs(OPERATORS):
            raise refused(
                f"quantized experts on {device.name} where their references, which wait for it, come first ({prefix})"
            )
        if lacking := kind.fl_lacking():
            raise refused(f"the weights of {prefix} ({lacking})")
        kind.fl_bind(prefix)
        return kind

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        """Return the scheme of a linear layer or experts; a string if the checkpoint leaves them unquantized."""
        raise NotImplementedError

    def fl_quantizes_head(self, prefix: str) -> bool:
        """Whether the product that makes logits is also named as quantized."""
        return False

    def fl_quantizes_cache(self) -> bool:
        """Whether the checkpoint has scales for an fp8 cache; SGLang then uses one unless the user names another."""
        algorithm = getattr(self, "kv_cache_quant_algo", None)
        return isinstance(algorithm, str) and algorithm.upper() == "FP8"


class Fp8ConfigFL(Served, Fp8Config):
    """``fp8``: dynamic, static, or in blocks."""

    fl_format = "fp8"

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return LEFT
        return schemes.fp8(self.activation_scheme, self.weight_block_size)


class CompressedTensorsConfigFL(Served, CompressedTensorsConfig):
    """``compressed-tensors``: weights of 4 bits, and of 8 bits with inputs of 8 bits or unquantized inputs."""

    fl_format = "compressed-tensors"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfigFL:
        if config.get("transform_config"):  # SGLang drops it
            raise refused("compressed-tensors with 'transform_config'")
        made: CompressedTensorsConfigFL = super().from_config(config)
        return made

    @classmethod
    def _quantization_scheme_map_from_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return SGLang's reading, including inputs of weight formats for which SGLang drops them."""
        found: dict[str, Any] = super()._quantization_scheme_map_from_config(config)
        for group in config.get("config_groups", {}).values():
            if inputs := group.get("input_activations"):
                for target in group["targets"]:
                    found[target]["input_activations"] = QuantizationArgs.model_validate(inputs)
        return found

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        return self._products(layer, prefix) if isinstance(layer, FusedMoE) else self._scheme(layer, prefix)

    def _scheme(self, layer: Any, prefix: str) -> Scheme | str:
        """Return the scheme of a layer by the library's rules: names and expressions before classes.

        SGLang knows the parts of joined layers only for some models, and treats plain names as suffixes.
        """
        parts = layer_parts.names_of_parts(prefix, self.packed_modules_mapping)
        owner = type(layer).__name__.lower()
        targets = schemes.in_order(self.target_scheme_map)
        classes = (self._read(target) for target in targets if target.lower() in owner)
        return layer_parts.agreed(self._named, prefix, parts, next(classes, LEFT), refused)

    def _named(self, name: str) -> Scheme | str | None:
        """Return a layer's scheme by its name, or ``None`` if no target names it."""
        if any(_matches(name, target) for target in self.ignore):
            return LEFT
        targets = schemes.in_order(self.target_scheme_map)
        return next((self._read(target) for target in targets if _matches(name, target)), None)

    def _read(self, target: str) -> Scheme | str:
        found: Mapping[str, Any] = self.target_scheme_map[target]
        form = found.get("format") or self.quant_format
        return schemes.compressed(found.get("weights"), found.get("input_activations"), form)

    def _products(self, layer: Any, prefix: str) -> Scheme | str:
        """Return the scheme of the products of a layer's experts, which must be equal."""
        self._add_fused_moe_to_target_scheme_map()
        products = [self._scheme(layer, f"{prefix}.0.{product}") for product in PRODUCTS]
        return schemes.of_experts(products, prefix, refused)

    def fl_quantizes_head(self, prefix: str) -> bool:
        return isinstance(self._named(prefix), Scheme)


def _matches(name: str, target: str) -> bool:
    """Whether a target names this layer: by its whole name, or by an expression that matches from the start."""
    if target.startswith(EXPRESSION):
        return re.match(target.removeprefix(EXPRESSION), name) is not None
    return layer_parts.below_roots(target) == layer_parts.below_roots(name)


class GPTQConfigFL(Served, GPTQConfig):
    """``gptq``: symmetric."""

    fl_format = "gptq"
    is_symmetric = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GPTQConfigFL:
        made: GPTQConfigFL = super().from_config(config)
        made.is_symmetric = bool(cls.get_from_keys_or(config, ["sym"], True))
        return made

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        parts = layer_parts.names_of_parts(prefix, self.packed_modules_mapping)
        if isinstance(layer, FusedMoE):
            parts = [f"{prefix}.0.{product}" for product in PRODUCTS]
        usual = {"bits": self.weight_bits, "group_size": self.group_size, "desc_act": self.desc_act}
        usual["sym"] = self.is_symmetric
        scheme: Scheme | str = schemes.gptq(usual)
        return layer_parts.agreed(schemes.gptq_rule(usual, self.dynamic), prefix, parts, scheme, refused)

    def fl_quantizes_head(self, prefix: str) -> bool:
        return bool(self.lm_head_quantized)


class AWQConfigFL(Served, AWQConfig):
    """``awq``: 4 bits."""

    fl_format = "awq"
    modules_to_not_convert: list[str]

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self.modules_to_not_convert = hf_to_sglang_mapper.apply_list(self.modules_to_not_convert)

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        parts = [] if isinstance(layer, FusedMoE) else layer_parts.names_of_parts(prefix, self.packed_modules_mapping)
        rule = schemes.awq_rule(self.modules_to_not_convert or ())
        scheme: Scheme | str = schemes.awq(self.weight_bits, self.group_size, self.zero_point)
        return layer_parts.agreed(rule, prefix, parts, scheme, refused)


class AutoRoundConfigFL(AutoRoundConfig):
    """``auto-round``, read as ``gptq`` or ``awq``, which pack int32 in the same order."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        method, packed = auto_round.as_packed(config, refused)
        return {"gptq": GPTQConfigFL, "awq": AWQConfigFL}[method].from_config(packed)


class QuarkConfigFL(QuarkConfig):
    """``quark``, read as the format with the same tensors."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return CompressedTensorsConfigFL.from_config(quark.as_compressed(config, refused))


class Mxfp4ConfigFL(Served, Mxfp4Config):
    """``mxfp4``: the experts of gpt-oss; other layers are not quantized."""

    fl_format = "mxfp4"

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        return schemes.mxfp4() if isinstance(layer, FusedMoE) else LEFT


class ModelOpt(Served):
    """``modelopt``: fp8 with a scale per weight and one for inputs, MXFP8, NVFP4 with such or unquantized inputs."""

    fl_format = "modelopt"
    fl_algorithm: str
    fl_changed: Mapping[str, str] = {}
    """Entries that replace those of the checkpoint's configuration for SGLang's class."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = super().from_config({**config, **cls.fl_changed})
        made.fl_algorithm = schemes.modelopt_algorithm(config)
        return made

    def fl_scheme(self, layer: Any, prefix: str) -> Scheme | str:
        host: Any = self
        if host.is_layer_excluded(prefix) or is_layer_skipped(
            prefix, host.exclude_modules, fused_mapping=host.packed_modules_mapping or {}
        ):
            return LEFT
        return schemes.modelopt(self.fl_algorithm, getattr(self, "group_size", 0))

    def fl_quantizes_head(self, prefix: str) -> bool:
        return not isinstance(self.fl_scheme(None, prefix), str)


class ModelOptFp8ConfigFL(ModelOpt, ModelOptFp8Config):
    """``modelopt`` in fp8."""


class ModelOptFp4ConfigFL(ModelOpt, ModelOptFp4Config):
    """``modelopt`` in NVFP4."""


class ModelOptMxfp8ConfigFL(ModelOpt, ModelOptFp8Config):
    """MXFP8, which SGLang reads with its class for ``fp8``, without the patterns of ``modelopt``."""

    fl_changed: Mapping[str, str] = {"quant_algo": "FP8"}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        if not config.get("quant_algo"):
            raise refused("quantization 'mxfp8'")
        return super().from_config(config)
