"""vLLM's kernels of quantized linear layers over our operators, one class a kind of vLLM's.

vLLM asks ``is_supported`` and ``can_implement`` of the classes that are registered for the platform, makes one object a
layer, has it change the loaded weights once, and calls it for the product. It looks at no base class of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fl_dispatch.hosting.quantized import layers, orders

Answer = tuple[bool, str | None]


class VllmKernel(layers.QuantizedLayer):
    """The part that all kinds share: they quantize rows themselves."""

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On every device that has the type: the reference runs where nothing else does."""
        lacking = cls.fl_lacking()
        return not lacking, lacking or None

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Every scheme that :func:`fl_dispatch.hosting.quantized.schemes.served` lets through."""
        return True, None

    def input_quant_key(self) -> None:
        """Rows are quantized here, not by the layer before."""


class Int8Layer(VllmKernel, layers.Int8Layer):
    pass


class Fp8Layer(VllmKernel, layers.Fp8Layer):
    pass


class Fp8BlockLayer(VllmKernel, layers.Fp8BlockLayer):
    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.fl_block = int(config.weight_quant_key.scale.group_shape.row)


class Fp8WeightLayer(VllmKernel, layers.Fp8WeightLayer):
    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.fl_dtype = config.input_dtype


class PackedLayer(VllmKernel, layers.PackedLayer):
    """vLLM has brought ``awq`` into the order of ``gptq``, with zero points as ``compressed-tensors`` has them."""

    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        super().__init__(c)
        assert w_zp_param_name is not None
        self.fl_weights = w_q_param_name, w_s_param_name, w_zp_param_name
        self.fl_bits, self.fl_zero_points = c.weight_type.size_bits, c.zero_points

    @classmethod
    def get_min_capability(cls) -> int:
        """The least of any GPU."""
        return 0

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """A rank's part has whole groups and words."""
        bits, inner = c.weight_type.size_bits, c.partition_weight_shape[0]
        if c.group_size > 0 and inner % c.group_size:
            return False, f"{inner} rows of the weight are no whole number of groups of {c.group_size}"
        if any(size % (orders.WORD // bits) for size in c.partition_weight_shape):
            return False, f"a weight of {c.partition_weight_shape} elements fills no whole words"
        return True, None


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
    except ValueError:  # vLLM 0.32 has no word for this kind
        linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(platform, []).append(Fp8BlockLayer)
    # No version has one for this kind.
    linear._POSSIBLE_WFP8A16_KERNELS.setdefault(platform, []).append(Fp8WeightLayer)
