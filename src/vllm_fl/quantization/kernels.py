"""vLLM's kernels of quantized linear layers over our operators, one class a kind of vLLM's.

vLLM asks ``is_supported`` and ``can_implement`` of the classes that are registered for the platform, makes one object a
layer, has it change the loaded weights once, and calls it for the product. It looks at no base class, so these have
none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_dispatch import bind_op
from fl_dispatch.hosting.attached import Attached
from fl_dispatch.ops.quantization import TENSOR

from . import orders

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
Answer = tuple[bool, str | None]


class QuantizedLayer:
    """The part that all kinds share: the operators of one layer, bound for its prefix."""

    fl_operator: str
    fl_weights: tuple[str, ...]
    """The layer's parameters that stay from call to call."""
    fl_call: Callable[..., Tensor]

    def __init__(self, config: Any) -> None:
        self.config = config
        self.fl_bind(None)

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators for the layer with this prefix; ``None`` while it is not known."""
        self.fl_call = bind_op(self.fl_operator, scope)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """On every device: the reference runs where nothing else does."""
        return True, None

    def input_quant_key(self) -> None:
        """Rows are quantized here, not by the layer before."""

    def _keep(self, layer: nn.Module, **parameters: Tensor | None) -> None:
        """Put a layer's parameters into the operator's form, for good."""
        for name, value in parameters.items():
            setattr(layer, name, None if value is None else nn.Parameter(value, requires_grad=False))
        KERNEL.give(layer, self)


KERNEL = Attached[QuantizedLayer]("fl_kernel")
"""The kernel of ours that computes a layer's product."""


class ScaledLayer(QuantizedLayer):
    """Rows and weights of 8 bits: ``quantize``, then ``scaled_linear``."""

    fl_operator = "scaled_linear"
    fl_weights = ("weight", "weight_scale")
    fl_type: str
    fl_block = 0
    fl_quantize: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)

    def fl_bind(self, scope: str | None) -> None:
        super().fl_bind(scope)
        self.fl_quantize = bind_op("quantize", scope)

    def process_weights_after_loading(self, layer: Any) -> None:
        """A scale for each column, and at most one for the rows."""
        rows = getattr(layer, "input_scale", None)
        self._keep(
            layer,
            weight=layer.weight.data.contiguous(),
            weight_scale=orders.scale_of_columns(layer.weight_scale.data, layer.logical_widths),
            input_scale=None if rows is None else rows.data.max().view(1),
        )

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product."""
        given, block = layer.input_scale, self.fl_block
        rows, scales = self.fl_quantize(x, self.fl_type, block if given is None else TENSOR, given)
        return self.fl_call(rows, scales, layer.weight, layer.weight_scale, bias, DTYPES[x.dtype], block)


class Int8Layer(ScaledLayer):
    """``int8``: rows quantized when they come, or by a scale of the checkpoint."""

    fl_type = "int8"

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Without zero points."""
        return (True, None) if c.input_symmetric else (False, "vllm_fl quantizes rows without zero points only")


class Fp8Layer(ScaledLayer):
    """``fp8`` with a scale for each column, merged layer or weight.

    vLLM asks for one scale for all rows of a batch where it knows no better; each row gets its own, so that a request's
    tokens do not depend on the requests beside it.
    """

    fl_type = "float8_e4m3fn"

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Not with groups."""
        shape = c.weight_quant_key.scale.group_shape
        if not (shape.is_per_tensor() or shape.is_per_channel()):
            return (
                False,
                f"vllm_fl has fp8 weights with a scale a column or a weight here, not {shape.row} x {shape.col}",
            )
        return True, None


class Fp8BlockLayer(ScaledLayer):
    """``fp8`` with a scale for each block, as DeepSeek-V3 has it."""

    fl_type = "float8_e4m3fn"

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.fl_block = int(config.weight_quant_key.scale.group_shape.row)

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Square blocks."""
        block, rows = config.weight_quant_key.scale.group_shape, config.activation_quant_key.scale
        if block.row != block.col or rows.static or rows.group_shape.col != block.col:
            return False, f"vllm_fl has square blocks only, not {block.row} x {block.col}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """The scales are called ``weight_scale_inv`` in ``fp8`` checkpoints."""
        found = layer.weight_scale_inv if hasattr(layer, "weight_scale_inv") else layer.weight_scale
        scale = found.data.float().contiguous()
        self._keep(
            layer,
            weight=layer.weight.data.contiguous(),
            weight_scale=scale,
            weight_scale_inv=None,
            input_scale=None,
        )


class Fp8WeightLayer(QuantizedLayer):
    """Weights of ``fp8`` for rows as they are."""

    fl_operator = "weight_only_linear"
    fl_weights = ("weight", "weight_scale")

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        super().__init__(config)

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Not with groups."""
        return Fp8Layer.can_implement(c)

    def process_weights_after_loading(self, layer: Any) -> None:
        """A scale for each column."""
        scale = orders.scale_of_columns(layer.weight_scale.data, layer.logical_widths)
        self._keep(layer, weight=layer.weight.data.contiguous(), weight_scale=scale.to(self.config.input_dtype))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product."""
        return self.fl_call(x, layer.weight, layer.weight_scale, None, bias)


class PackedLayer(QuantizedLayer):
    """``mp``: weights of 4 or 8 bits, packed in words, for rows as they are."""

    fl_operator = "weight_only_linear"

    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        super().__init__(c)
        assert w_zp_param_name is not None
        self.fl_weights = w_q_param_name, w_s_param_name, w_zp_param_name

    @classmethod
    def get_min_capability(cls) -> int:
        """The least of any GPU."""
        return 0

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        """Integers of 4 and 8 bits."""
        bits, inner = c.weight_type.size_bits, c.partition_weight_shape[0]
        if bits not in (4, 8) or not c.weight_type.is_integer():
            return False, f"vllm_fl has weights of 4 and 8 bits only, not {c.weight_type}"
        if not c.weight_type.has_bias() and not c.zero_points:
            return False, f"vllm_fl knows no {c.weight_type} without zero points"
        if c.group_size > 0 and inner % c.group_size:
            return False, f"{inner} rows of the weight are no whole number of groups of {c.group_size}"
        if any(size % (orders.WORD // bits) for size in c.partition_weight_shape):
            return False, f"a weight of {c.partition_weight_shape} elements fills no whole words"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpack the words of ``compressed-tensors``, or of ``gptq``, whose weight and scales are transposed.

        vLLM has brought ``awq`` into the order of ``gptq``, with zero points as ``compressed-tensors`` has them.
        """
        bits, (weight_name, scale_name, zero_name) = self.config.weight_type.size_bits, self.fl_weights
        weight, scale, zero = (getattr(layer, name, None) for name in self.fl_weights)
        assert weight is not None
        assert scale is not None
        numbers, scales = orders.unpack(weight.data, bits, weight.packed_dim), scale.data
        if weight.input_dim == 0:
            numbers, scales = numbers.t(), scales.t()
        zeros = None
        if zero is not None and self.config.zero_points:
            zeros = orders.zero_points(orders.unpack(zero.data, bits, zero.packed_dim), bits)
        forms = {weight_name: orders.packed_weight(numbers, bits), scale_name: scales.contiguous(), zero_name: zeros}
        self._keep(layer, **forms)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product."""
        weight, scale, zero = (getattr(layer, name) for name in self.fl_weights)
        return self.fl_call(x, weight, scale, zero, bias)


def kernels(model: nn.Module) -> Iterator[tuple[str, nn.Module, QuantizedLayer]]:
    """The layers of a model whose product is ours: prefix, layer and kernel."""
    for prefix, module in model.named_modules():
        if (kernel := KERNEL.find(module)) is not None:
            yield prefix, module, kernel


def weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Those layers, each with the names of the parameters that stay from call to call."""
    for _, layer, kernel in kernels(model):
        yield from ((layer, name) for name in kernel.fl_weights if getattr(layer, name) is not None)


def register() -> None:
    """Register the kinds with vLLM for out-of-tree platforms."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    platform = PlatformEnum.OOT
    linear.register_linear_kernel(Int8Layer, platform, "int8")
    linear.register_linear_kernel(Fp8Layer, platform, "fp8")
    linear.register_linear_kernel(PackedLayer, platform, "mp")
    # vLLM 0.32 has no word for these two kinds.
    linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(platform, []).append(Fp8BlockLayer)
    linear._POSSIBLE_WFP8A16_KERNELS.setdefault(platform, []).append(Fp8WeightLayer)
