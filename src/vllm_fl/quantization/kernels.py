"""vLLM's kernels of quantized linear layers over our operators, one class per kind of vLLM's kernels.

vLLM calls ``is_supported`` and ``can_implement`` of the platform's registered classes, makes one object per layer, lets
it change the loaded weights once, and calls it for the product. It does not check for a base class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fl_dispatch.hosting.quantized import layers, orders, schemes
from fl_dispatch.hosting.quantized.schemes import Kind, Numbers, Scheme

from . import refused

Answer = tuple[bool, str | None]
ASKED = "a product that vLLM asks for"
"""The place in refusals, because vLLM does not say which checkpoint formats a product is for."""
TYPES = {torch.int8: "int", torch.float8_e4m3fn: "float"}
"""Dtype of a quantized number → its kind; vLLM asks for other dtypes, too."""
SHARED = {(-1, -1): schemes.TENSOR, (-1, 1): schemes.CHANNEL, (1, -1): schemes.TOKEN}
"""Rows and columns with one scale in vLLM's notation, -1 for all → the name of the unit with one scale."""


class VllmKernel(layers.QuantizedLayer):
    """The part that all kinds share: they quantize rows themselves."""

    fl_kind: ClassVar[Kind]

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether the device has the type; the reference runs if no other implementation does."""
        lacking = cls.fl_lacking()
        return not lacking, lacking or None

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Whether :func:`fl_dispatch.hosting.quantized.schemes.served` gives this kind for the scheme."""
        try:
            kind = schemes.served(cls.fl_scheme(c), "", refused)
        except ValueError as error:
            return False, str(error)
        return kind is cls.fl_kind, None if kind is cls.fl_kind else f"multiplies {cls.fl_kind.value}, not {kind.value}"

    @staticmethod
    def fl_scheme(c: Any) -> Scheme:
        """Return the scheme in vLLM's configuration of a product."""
        return Scheme(ASKED, _numbers(c.weight_quant_key, schemes.BLOCK), _numbers(c.activation_quant_key))

    def input_quant_key(self) -> None:
        """Return ``None``, because rows are quantized here, not by the layer before."""


def _numbers(key: Any, shared: str = schemes.GROUP) -> Numbers:
    """Return the format in vLLM's ``QuantKey``; ``shared``: the name of another unit with one scale."""
    down, across = key.scale.group_shape
    per, bits = SHARED.get((down, across), shared), getattr(key.dtype, "size_bits", 0) or 8 * key.dtype.itemsize
    sizes: dict[str, Any] = {schemes.GROUP: {"group": across}, schemes.BLOCK: {"block": (down, across)}}.get(per, {})
    kind, dynamic = TYPES.get(key.dtype, str(key.dtype)), not key.scale.static
    return Numbers(bits, kind, per, **sizes, symmetric=key.symmetric, dynamic=dynamic)


class Int8Layer(VllmKernel, layers.Int8Layer):
    fl_kind = Kind.INT8

    @staticmethod
    def fl_scheme(c: Any) -> Scheme:
        weights = Numbers(8, "int", schemes.CHANNEL if c.is_channelwise else schemes.TENSOR)
        per = schemes.TENSOR if c.is_static_input_scheme else schemes.TOKEN
        rows = Numbers(8, "int", per, symmetric=c.input_symmetric, dynamic=not c.is_static_input_scheme)
        return Scheme(ASKED, weights, rows)


class Fp8Layer(VllmKernel, layers.Fp8Layer):
    fl_kind = Kind.FP8


class Fp8BlockLayer(VllmKernel, layers.Fp8BlockLayer):
    fl_kind = Kind.FP8_BLOCKS

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.fl_block = int(config.weight_quant_key.scale.group_shape.row)


class Fp8WeightLayer(VllmKernel, layers.Fp8WeightLayer):
    fl_kind = Kind.FP8_WEIGHT

    @staticmethod
    def fl_scheme(c: Any) -> Scheme:
        """Return the scheme; vLLM names a kind of inputs here, too, but leaves them unquantized."""
        return Scheme(ASKED, _numbers(c.weight_quant_key, schemes.BLOCK))

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.fl_dtype = config.input_dtype


class PackedLayer(VllmKernel, layers.PackedLayer):
    """Packed weights; vLLM converts ``awq`` to the order of ``gptq`` with ``compressed-tensors`` zero points."""

    fl_kind = Kind.COMPRESSED

    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        super().__init__(c)
        assert w_zp_param_name is not None
        self.fl_weights = w_q_param_name, w_s_param_name, w_zp_param_name
        self.fl_bits, self.fl_zero_points = c.weight_type.size_bits, c.zero_points

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the smallest capability of any GPU."""
        return 0

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Whether the scheme is served, and a rank's part has whole groups and whole packed int32."""
        served, why = super().can_implement(c)
        if not served:
            return served, why
        bits, inner = c.weight_type.size_bits, c.partition_weight_shape[0]
        if c.group_size > 0 and inner % c.group_size:
            return False, f"{inner} rows of the weight are no whole number of groups of {c.group_size}"
        if any(size % orders.whole_words(bits) for size in c.partition_weight_shape):
            return False, f"a weight of {c.partition_weight_shape} elements fills no whole words"
        return True, None

    @staticmethod
    def fl_scheme(c: Any) -> Scheme:
        kind = "int" if c.weight_type.is_integer() else str(c.weight_type)
        per = schemes.GROUP if c.group_size > 0 else schemes.CHANNEL
        weights = Numbers(c.weight_type.size_bits, kind, per, c.group_size, symmetric=not c.zero_points)
        plain = c.act_type in layers.DTYPES
        rows = None if plain else Numbers(8 * c.act_type.itemsize, str(c.act_type), schemes.TOKEN, dynamic=True)
        return Scheme(ASKED, weights, rows, schemes.PACKED_FORM)


GROUPED: Mapping[Kind, type[layers.GroupedLayer]] = {
    Kind.INT4: layers.Int4Layer,
    Kind.MXFP4: layers.Float4Layer,
    Kind.NVFP4: layers.Float4Layer,
    Kind.MXFP8: layers.Mxfp8Layer,
}
"""Kinds of layers for which vLLM requests no registered kernel → the class that makes their parameters.

vLLM chooses only NVIDIA's kernels for the floats, and would treat the integers as weights for unquantized inputs.
"""


def register() -> None:
    """Register the kinds with vLLM for out-of-tree platforms."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    platform = PlatformEnum.OOT
    linear.register_linear_kernel(Int8Layer, platform, "int8")
    linear.register_linear_kernel(Fp8Layer, platform, "fp8")
    linear.register_linear_kernel(PackedLayer, platform, "mp")
    try:
        linear.register_linear_kernel(Fp8BlockLayer, platform, "fp8_block")
    except ValueError:  # vLLM 0.32 has no name for this kind
        linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(platform, []).append(Fp8BlockLayer)
    # No version has a name for this kind.
    linear._POSSIBLE_WFP8A16_KERNELS.setdefault(platform, []).append(Fp8WeightLayer)
