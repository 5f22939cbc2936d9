"""vLLM's quantization configurations, changed where vLLM requests CUDA kernels before ours are chosen.

Each assigns kinds of :mod:`.kernels` to linear layers and of :mod:`.expert_method` to experts.
"""

from __future__ import annotations

from copy import copy
from fractions import Fraction
from functools import partial
from types import NoneType
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    auto_awq,
    auto_gptq,
    fp8,
    inc,
    modelopt,
    mxfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors import schemes as vllms
from vllm.model_executor.layers.quantization.compressed_tensors.transform.linear import get_linear_transform_schemes
from vllm.model_executor.layers.quantization.quark import quark as vllms_quark
from vllm.model_executor.layers.quantization.utils.gptq_utils import is_layer_gptq_quantized
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.scalar_type import scalar_types

from fl_dispatch.hosting.quantized import auto_round, layer_parts, orders, quark, remedies, schemes, stored_experts
from fl_dispatch.hosting.quantized.configurations import check
from fl_dispatch.hosting.quantized.layers import DTYPES
from fl_dispatch.hosting.quantized.schemes import LEFT, Kind, Scheme

from . import methods, refused
from .blocks import create_in_blocks
from .expert_method import QuantizedMethod
from .kernels import GROUPED


class Served:
    """The common part of all: models of any dtype, and logits by a plain product."""

    fl_format: str
    """The format's name in checkpoints."""
    fl_loads: type | None = None
    """A class of experts with its own loader that knows the format."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        check(cls.fl_format, config, refused)
        return super().from_config(config)  # type: ignore[misc]

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(DTYPES)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of a layer; ``None`` for vLLM's own.

        Raises:
            ValueError: a quantized head, or a kind of weights, is not served.
        """
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        method = self.fl_method(layer, prefix)
        if isinstance(layer, ParallelLMHead) and not isinstance(method, (UnquantizedEmbeddingMethod, NoneType)):
            raise refused(f"a quantized head ({prefix})")
        return method

    def fl_check_index_keys(self, layer: Any, prefix: str) -> None:
        """Refuse a weight of index keys that vLLM's loader does not dequantize; ``prefix``: its name in checkpoints.

        The loader dequantizes fp8 with a scale for each block or column, and would load other formats as plain numbers.

        Raises:
            ValueError: for such a weight.
        """
        asked = copy(layer)  # a scheme is stored in the layer that was asked for
        method = self.fl_method(asked, prefix)
        scheme = getattr(asked, "scheme", method)
        by_columns = getattr(getattr(scheme, "strategy", None), "value", None) == schemes.CHANNEL
        fp8s = isinstance(scheme, methods.Fp8MethodFL | vllms.CompressedTensorsW8A8Fp8)
        known = fp8s and (scheme.weight_block_size or by_columns)
        if not known and not isinstance(method, (UnquantizedLinearMethod, NoneType)):
            raise refused(f"index keys with such a quantized weight ({prefix})", remedies.INDEX_KEYS)

    def _experts(self, layer: Any, prefix: str) -> Any:
        """Return the method of a layer's experts."""
        kind, scheme = type(layer), self.fl_experts(layer, prefix)
        if isinstance(scheme, str):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        kernel = stored_experts.KINDS[schemes.served(scheme, prefix, refused, experts=True)](scheme)
        # A model's own loader knows vLLM's methods by name, and would load other methods' weights as plain numbers.
        if kind.weight_loader is not RoutedExperts.weight_loader and kind is not self.fl_loads:
            raise refused(f"quantized experts that {kind.__name__} loads in a way of its own ({prefix})")
        return QuantizedMethod(kernel, layer.moe_config)

    def fl_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of a layer of a served kind."""
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        """Return the scheme of a layer's experts; a string if the checkpoint leaves them unquantized."""
        raise NotImplementedError


class Fp8ConfigFL(Served, fp8.Fp8Config):
    """``fp8``: a scale for each weight, or for each block of one."""

    fl_format = "fp8"

    def fl_method(self, layer: Any, prefix: str) -> Any:
        method = super().fl_method(layer, prefix)
        if type(method) is not fp8.Fp8LinearMethod:
            return method
        schemes.served(schemes.fp8(self.activation_scheme, self.weight_block_size), prefix, refused)
        return methods.Fp8MethodFL(self)

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        if _skipped(self, prefix, self.ignored_layers, self.ignored_layers_match_mode):
            return LEFT
        return schemes.fp8(self.activation_scheme, self.weight_block_size)


class GPTQConfigFL(Served, auto_gptq.AutoGPTQConfig):
    """``gptq``: symmetric, also of 2 and 3 bits, and with other bits and groups for some layers."""

    fl_format = "gptq"
    TYPE_MAP: ClassVar[dict[tuple[int, bool], Any]] = {
        **auto_gptq.AutoGPTQConfig.TYPE_MAP,
        (2, True): scalar_types.uint2b2,
        (3, True): scalar_types.uint3b4,
    }

    def fl_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, ParallelLMHead) and self.lm_head_quantized:
            raise refused(f"a quantized head ({prefix})")
        if not isinstance(layer, LinearBase):
            return None
        mapping = self.packed_modules_mapping
        found = self._scheme(prefix, layer_parts.names_of_parts(prefix, mapping))
        if found == LEFT or not is_layer_gptq_quantized(prefix, self.modules_in_block_to_quantize, mapping):
            return UnquantizedLinearMethod()
        return methods.GPTQMethodFL(self._of_layer(found, prefix))

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        return self._scheme(prefix, _products(layer, prefix))

    def _scheme(self, prefix: str, parts: list[str]) -> Scheme | str:
        usual = {"bits": self.weight_bits, "group_size": self.group_size, "desc_act": self.desc_act, "sym": self.is_sym}
        scheme: Scheme | str = schemes.gptq(usual)
        return layer_parts.agreed(schemes.gptq_rule(usual, self.dynamic), prefix, parts, scheme, refused)

    def _of_layer(self, found: Any, prefix: str) -> GPTQConfigFL:
        """Return this configuration with a layer's own bits and groups."""
        schemes.served(found, prefix, refused)
        bits, made = found.weights.bits, copy(self)
        made.weight_bits, made.group_size, made.pack_factor = bits, found.weights.group, Fraction(orders.WORD, bits)
        made.desc_act, made.quant_type = False, self.TYPE_MAP[bits, True]
        return made


class AWQConfigFL(Served, auto_awq.AutoAWQConfig):
    """``awq``: 4 bits with zero points."""

    fl_format = "awq"

    def fl_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            found = self._scheme(prefix, layer_parts.names_of_parts(prefix, self.packed_modules_mapping))
            if isinstance(found, str):
                return UnquantizedLinearMethod()
            schemes.served(found, prefix, refused)
            return methods.AWQMethodFL(self)
        method = super().fl_method(layer, prefix)
        return methods.AWQMethodFL(self) if isinstance(method, auto_awq.AutoAWQLinearMethod) else method

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        return self._scheme(prefix, [])

    def _scheme(self, prefix: str, parts: list[str]) -> Scheme | str:
        scheme: Scheme | str = schemes.awq(self.weight_bits, self.group_size, self.zero_point)
        rule = schemes.awq_rule(self.modules_to_not_convert or ())
        return layer_parts.agreed(rule, prefix, parts, scheme, refused)


class AutoRoundConfigFL(inc.INCConfig):
    """``auto-round``, read as ``gptq`` or ``awq``, which pack int32 in the same order."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        method, packed = auto_round.as_packed(config, refused)
        return {"gptq": GPTQConfigFL, "awq": AWQConfigFL}[method].from_config(packed)


class QuarkConfigFL(vllms_quark.QuarkConfig):
    """``quark``, read as the format with the same tensors."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return CompressedTensorsConfigFL.from_config(quark.as_compressed(config, refused))


class Mxfp4ConfigFL(Served, mxfp4.GptOssMxfp4Config):
    """``mxfp4``: the experts of gpt-oss; other layers are not quantized."""

    fl_format = "mxfp4"
    fl_loads = GptOssRoutedExperts

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        return schemes.mxfp4()


class ModelOpt(Served):
    """``modelopt``: fp8 with a scale per weight and one for inputs, MXFP8, NVFP4 with such or unquantized inputs."""

    fl_format = "modelopt"
    fl_algorithm: str

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = super().from_config(config)
        made.fl_algorithm = schemes.modelopt_algorithm(config)
        return made

    def fl_method(self, layer: Any, prefix: str) -> Any:
        method = super().fl_method(layer, prefix)
        if isinstance(method, UnquantizedLinearMethod) and isinstance(layer, ParallelLMHead):
            return None
        if not isinstance(method, modelopt.ModelOptLinearMethod):
            return method
        scheme = self._scheme()
        if (kind := schemes.served(scheme, prefix, refused)) in GROUPED:
            return methods.GroupedMethodFL(scheme, kind, prefix)
        return methods.Fp8MethodFL(fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="static"))

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        host: Any = self
        return LEFT if host.is_layer_excluded(prefix) else self._scheme()

    def _scheme(self) -> Scheme:
        return schemes.modelopt(self.fl_algorithm, getattr(self, "group_size", 0))


class ModelOptFp8ConfigFL(ModelOpt, modelopt.ModelOptFp8Config):
    """``modelopt`` in fp8."""


class ModelOptMxfp8ConfigFL(ModelOpt, modelopt.ModelOptMxFp8Config):
    """``modelopt`` in MXFP8."""


class ModelOptNvfp4ConfigFL(ModelOpt, modelopt.ModelOptNvFp4Config):
    """``modelopt`` in NVFP4."""


MAKERS: dict[Kind, tuple[Any, str]] = {
    Kind.INT8: (vllms.CompressedTensorsW8A8Int8, "kernel"),
    Kind.FP8: (vllms.CompressedTensorsW8A8Fp8, "fp8_linear"),
    Kind.FP8_WEIGHT: (vllms.CompressedTensorsW8A16Fp8, "linear_kernel"),
    Kind.FP8_BLOCKS: (vllms.CompressedTensorsW8A8Fp8, "fp8_linear"),
    Kind.COMPRESSED: ((vllms.CompressedTensorsWNA16, vllms.CompressedTensorsWNA8Int), "kernel"),
}
"""Kinds of layers in ``compressed-tensors`` → vLLM's classes that make their parameters, and the kernel's name."""


class CompressedTensorsConfigFL(Served, compressed_tensors.CompressedTensorsConfig):
    """``compressed-tensors``: each layer by the first target that covers it, with vLLM's parameters and our kernels."""

    fl_format = "compressed-tensors"

    def fl_method(self, layer: Any, prefix: str) -> Any:
        by_heads = (self.kv_cache_scheme or {}).get("strategy") == "attn_head"
        if by_heads and isinstance(layer, Attention) and layer.kv_cache_dtype.startswith("fp8"):
            raise refused(f"{remedies.SCALE_A_HEAD} ({prefix})", remedies.HEADS)
        return super().fl_method(layer, prefix)

    def __init__(self, target_scheme_map: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        in_order = schemes.in_order(target_scheme_map)  # vLLM takes the order of modules in the file
        super().__init__({name: target_scheme_map[name] for name in in_order}, *args, **kwargs)

    def get_scheme(self, layer: Any, layer_name: str | None = None) -> Any:
        prefix = layer_name or ""
        parts = layer_parts.names_of_parts(prefix, self.packed_modules_mapping)
        layer_parts.check_equal(prefix, parts, [self._read(layer, part) for part in parts], refused)
        found = self._read(layer, layer_name)
        if isinstance(found, str):
            return None
        kind = schemes.served(found, prefix, refused)
        if kind in GROUPED:
            return methods.GroupedMethodFL(found, kind, prefix)
        scheme: Any = super().get_scheme(layer, layer_name)
        maker, kernel = MAKERS[kind]
        if not isinstance(scheme, maker):
            name = type(scheme).__name__.removeprefix("CompressedTensors")
            raise refused(f"the scheme {name} of compressed-tensors ({prefix})")
        # With VLLM_BATCH_INVARIANT vLLM 0.33 multiplies packed weights directly, in their loaded form.
        scheme.use_batch_invariant = False
        block, create = getattr(scheme, "weight_block_size", None), scheme.create_weights
        if block:
            scheme.create_weights = partial(create_in_blocks, create, block[0], "weight_scale")
        if isinstance(scheme, vllms.CompressedTensorsW8A8Int8):
            scheme.create_weights = partial(methods.with_scale_of_each_input, create)
        if kind is Kind.COMPRESSED and not found.weights.symmetric:
            create = partial(methods.with_whole_words, create, found.weights.bits)
        if kind is Kind.COMPRESSED:
            scheme.create_weights = partial(methods.with_rows, create, scheme, found.rounding)
        # vLLM's code for fp8 transposes weights and requantizes merged layers; ours takes them as loaded.
        scheme.process_weights_after_loading = partial(methods.load, scheme, kernel)
        return scheme

    def fl_experts(self, layer: Any, prefix: str) -> Scheme | str:
        self._add_fused_moe_to_target_scheme_map()
        names = _products(layer, prefix)
        product = torch.nn.Linear(1, 1, device="meta")  # each of them, for code that goes by classes
        transforms = (get_linear_transform_schemes(product, name, self.transform_config, {}) for name in names)
        if any(before or after for before, after in transforms):
            raise refused(f"experts with transformed inputs or outputs ({prefix})")
        return schemes.of_experts([self._read(layer, name) for name in names], prefix, refused)

    def _read(self, layer: Any, name: str | None) -> Scheme | str:
        found = self.get_scheme_dict(layer, name)
        return schemes.compressed(found["weights"], found["input_activations"], found["format"]) if found else LEFT


def _products(layer: Any, prefix: str) -> list[str]:
    """Return a checkpoint's names of the products of a layer's first expert."""
    parts = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [f"{prefix}.0.{part}" for part in parts if part is not None]


def _skipped(config: Any, prefix: str, names: list[str], match_mode: Any) -> bool:
    """Whether a checkpoint's configuration leaves a layer unquantized."""
    mapping = config.packed_modules_mapping
    return bool(is_layer_skipped(prefix, names, mapping, match_mode=match_mode))
