"""vLLM's quantization configurations, where its own code asks for kernels of CUDA's before ours are chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, schemes
from vllm.model_executor.layers.quantization.compressed_tensors.transform.linear import get_linear_transform_schemes
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import PerTensorScaleParameter

from fl_dispatch.hosting.quantized import blocks, joined, orders, remedies

from . import experts
from .blocks import create_in_blocks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = (4, 8)


def refused(what: str, remedy: str = "") -> ValueError:
    """The error for what a checkpoint has and is not served; ``remedy``: what works."""
    return ValueError(f"vllm_fl does not support {what} yet{remedy and f'; {remedy}'}")


class Served:
    """The part that all have in common: models of any dtype, and logits by a plain product."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        method = self.fl_method(layer, prefix)
        if isinstance(layer, ParallelLMHead) and not isinstance(method, (UnquantizedEmbeddingMethod, NoneType)):
            raise ValueError(f"vllm_fl does not support a quantized head yet ({prefix})")
        return method

    def _experts(self, layer: Any, prefix: str) -> Any:
        method, kind = self.fl_experts(layer, prefix), type(layer)
        # A loader of a model's own knows vLLM's methods by name, and loads those of others as if they were plain.
        if kind.weight_loader is not RoutedExperts.weight_loader and isinstance(method, experts.QuantizedMethod):
            raise ValueError(f"vllm_fl does not support quantized experts that {kind.__name__} loads yet ({prefix})")
        return method

    def fl_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer of a kind that is served."""
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def fl_experts(self, layer: Any, prefix: str) -> Any:
        """The method of a layer's experts."""
        raise NotImplementedError


@register_weight_loader_v2_supported_method
class Fp8MethodFL(fp8.Fp8LinearMethod):
    """Leaves the scales of merged layers as they are; vLLM quantizes their weights again, for one scale.

    With ``VLLM_BATCH_INVARIANT`` vLLM multiplies itself, with weights as it has them; here they are not so.
    """

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        block = self.weight_block_size[0] if self.weight_block_size else 0
        create_in_blocks(super().create_weights, block, "weight_scale_inv", layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.fp8_linear.process_weights_after_loading(layer)
        # Latent attention asks for a weight without blocks by a product; otherwise vLLM expects it transposed.
        self.use_marlin = not self.block_quant

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.fp8_linear.apply_weights(layer, x, bias)
        return result


class Fp8ConfigFL(Served, fp8.Fp8Config):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8ConfigFL:
        blocks.warn_of_powers_of_two(config)
        made: Fp8ConfigFL = super().from_config(config)
        return made

    def fl_method(self, layer: Any, prefix: str) -> Any:
        method = super().fl_method(layer, prefix)
        return Fp8MethodFL(self) if type(method) is fp8.Fp8LinearMethod else method

    def fl_experts(self, layer: Any, prefix: str) -> Any:
        if _skipped(self, prefix, self.ignored_layers, self.ignored_layers_match_mode):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if self.store_dtype is not None:
            raise ValueError(f"vllm_fl does not support experts quantized by '{self.store_dtype}' yet ({prefix})")
        return experts.Fp8Method(self, layer.moe_config)


class WithoutMarlin:
    """Methods that choose among the registered kernels; vLLM's own ``__init__`` asks whether Marlin runs."""

    def __init__(self, quant_config: Any) -> None:
        self.quant_config, self.quant_type, self.input_dtype = quant_config, quant_config.quant_type, None


@register_weight_loader_v2_supported_method
class GPTQMethodFL(WithoutMarlin, auto_gptq.AutoGPTQLinearMethod):
    pass


class GPTQConfigFL(Served, auto_gptq.AutoGPTQConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GPTQConfigFL:
        if (bits := config["bits"]) not in BITS:
            raise refused(f"'gptq' with {bits} bits", remedies.BITS)
        if not config.get("sym", True):
            raise refused("'gptq' with zero points", remedies.ZERO_POINTS)
        if config.get("desc_act") and config.get("group_size") != -1:
            raise refused("'gptq' with desc_act in groups", remedies.COLUMNS)
        made: GPTQConfigFL = super().from_config(config)
        return made

    def fl_method(self, layer: Any, prefix: str) -> Any:
        return get_linear_quant_method(self, layer, prefix, GPTQMethodFL)

    def fl_experts(self, layer: Any, prefix: str) -> Any:
        return auto_gptq.get_moe_quant_method(self, layer, prefix, experts.GPTQMethod)


@register_weight_loader_v2_supported_method
class AWQMethodFL(WithoutMarlin, auto_awq.AutoAWQMarlinLinearMethod):
    pass


class AWQConfigFL(Served, auto_awq.AutoAWQConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AWQConfigFL:
        if (version := str(config.get("version", "")).lower()) in remedies.UNUSUAL_VERSIONS:
            raise refused(f"'awq' of version '{version}'", remedies.VERSION)
        made: AWQConfigFL = super().from_config(config)
        return made

    def fl_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            parts = joined.names_of_parts(prefix, self.packed_modules_mapping)
            if joined.agreed(self._named, prefix, parts, usual=False, said=joined.left, refused=refused):
                return UnquantizedLinearMethod()
            return AWQMethodFL(self)
        method = super().fl_method(layer, prefix)
        return AWQMethodFL(self) if isinstance(method, auto_awq.AutoAWQLinearMethod) else method

    def fl_experts(self, layer: Any, prefix: str) -> Any:
        if _skipped(self, prefix, self.modules_to_not_convert or [], "substring"):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return experts.AWQMethod(self, layer.moe_config)

    def _named(self, name: str) -> bool | None:
        """Whether a part of a layer's name is among those that are left as they are; ``None`` if not."""
        return any(part in name for part in self.modules_to_not_convert or ()) or None


SCHEMES: dict[type, str] = {
    schemes.CompressedTensorsW8A8Int8: "kernel",
    schemes.CompressedTensorsWNA16: "kernel",
    schemes.CompressedTensorsW8A8Fp8: "fp8_linear",
    schemes.CompressedTensorsW8A16Fp8: "linear_kernel",
}
"""The schemes of ``compressed-tensors`` that are served, and where each keeps its kernel."""


class CompressedTensorsConfigFL(Served, compressed_tensors.CompressedTensorsConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfigFL:
        groups = (config.get("config_groups") or {}).values()
        for order in ((group.get("weights") or {}).get("actorder") for group in groups):
            if order in orders.REORDERED:
                raise refused(f"compressed-tensors with actorder '{order}'", remedies.ORDER)
        made: CompressedTensorsConfigFL = super().from_config(config)
        return made

    def fl_method(self, layer: Any, prefix: str) -> Any:
        by_heads = (self.kv_cache_scheme or {}).get("strategy") == "attn_head"
        if by_heads and isinstance(layer, Attention) and layer.kv_cache_dtype.startswith("fp8"):
            raise refused(f"{remedies.SCALE_A_HEAD} ({prefix})", remedies.HEADS)
        return super().fl_method(layer, prefix)

    def __init__(self, target_scheme_map: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # The library's order (match_targets in utils/match.py), in which the first target that covers a layer counts;
        # vLLM takes the file's, which is the order of modules.
        names = sorted(target_scheme_map, key=lambda target: ("re:" in target, target))
        super().__init__({name: target_scheme_map[name] for name in names}, *args, **kwargs)

    def get_scheme(self, layer: Any, layer_name: str | None = None) -> Any:
        scheme: Any = super().get_scheme(layer, layer_name)
        if scheme is None:
            return None
        if type(scheme) not in SCHEMES:
            name = type(scheme).__name__.removeprefix("CompressedTensors")
            raise ValueError(f"vllm_fl does not support the scheme {name} of compressed-tensors yet ({layer_name})")
        # With VLLM_BATCH_INVARIANT vLLM 0.33 multiplies packed weights itself, as they are loaded.
        scheme.use_batch_invariant = False
        block, create = getattr(scheme, "weight_block_size", None), scheme.create_weights
        if block:
            scheme.create_weights = partial(create_in_blocks, create, block[0], "weight_scale")
        if isinstance(scheme, schemes.CompressedTensorsW8A8Int8):
            scheme.create_weights = partial(_with_scale_of_each_input, create)
        # vLLM's code for fp8 transposes weights and quantizes merged layers again; ours takes them as loaded.
        scheme.process_weights_after_loading = partial(_load, scheme, SCHEMES[type(scheme)])
        return scheme

    def fl_experts(self, layer: Any, prefix: str) -> Any:
        self._add_fused_moe_to_target_scheme_map()
        parts = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        names = [f"{prefix}.0.{part}" for part in parts if part is not None]
        product = torch.nn.Linear(1, 1, device="meta")  # each of them, to what goes by classes
        transforms = (get_linear_transform_schemes(product, name, self.transform_config, {}) for name in names)
        if any(before or after for before, after in transforms):
            raise ValueError(f"vllm_fl does not support experts whose inputs or outputs are transformed yet ({prefix})")
        found, *others = (self.get_scheme_dict(layer, name) for name in names)
        if any(other != found for other in others):
            raise ValueError(f"vllm_fl does not support experts whose products differ in their scheme yet ({prefix})")
        if found is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return self._experts_method(found, layer, prefix)

    def _experts_method(self, found: Any, layer: Any, prefix: str) -> Any:
        weights, rows, form = found["weights"], found["input_activations"], found["format"]
        packed = form == "pack-quantized" and weights.num_bits in BITS
        if self._is_wNa16_group_channel(weights, rows) and packed:
            return experts.CompressedPackedMethod(weights, layer.moe_config)
        inputs = "as they are"
        if rows is not None:
            same = weights.num_bits == rows.num_bits == 8 and weights.type == rows.type and rows.dynamic
            plain = weights.symmetric and rows.symmetric and not weights.dynamic
            if same and plain and (weights.strategy, rows.strategy) == ("channel", "token"):
                method = experts.CompressedInt8Method if weights.type == "int" else experts.CompressedFp8Method
                return method(weights, rows, layer.moe_config)
            scale = "a scale of the checkpoint" if not rows.dynamic else f"a scale a {rows.strategy}"
            inputs = f"of {rows.num_bits} bits with {scale}"
        kind = f"{weights.num_bits} bits ({weights.type}, {weights.strategy}, {form})"
        raise ValueError(
            f"vllm_fl does not support experts with weights of {kind} and inputs {inputs} in compressed-tensors yet "
            f"({prefix})"
        )


def _skipped(config: Any, prefix: str, names: list[str], match_mode: Any) -> bool:
    """Whether a checkpoint's configuration leaves a layer as it is."""
    mapping = config.packed_modules_mapping
    return bool(is_layer_skipped(prefix, names, mapping, match_mode=match_mode))


def _with_scale_of_each_input(
    create: Callable[..., None], layer: Any, output_partition_sizes: list[int], **named: Any
) -> None:
    """Register parameters as vLLM does; merged layers have a scale each for their input, where vLLM keeps the last."""
    create(layer=layer, output_partition_sizes=output_partition_sizes, **named)
    if layer.input_scale is not None:
        scales = torch.full((len(output_partition_sizes),), orders.UNSET)
        layer.input_scale = PerTensorScaleParameter(data=scales, weight_loader=named["weight_loader"])


def _load(scheme: Any, kernel: str, layer: Any) -> None:
    getattr(scheme, kernel).process_weights_after_loading(layer)


CONFIGS: dict[str, type[QuantizationConfig]] = {
    "auto_awq": AWQConfigFL,
    "auto_gptq": GPTQConfigFL,
    "compressed-tensors": CompressedTensorsConfigFL,
    "fp8": Fp8ConfigFL,
}


def register() -> None:
    """Register the configurations with vLLM under its names."""
    for name, config in CONFIGS.items():
        register_quantization_config(name)(config)
