"""SGLang's linear layers over the operator ``linear``: products with weights that are not quantized.

A layer calls its ``quant_method`` for the product. That object stays SGLang's, for SGLang asks for its class; its
``apply`` becomes a call of the operator. SGLang's two other ways are for models that ask for them and stay SGLang's: a
product that is added to a tensor, and one that is written into memory of the caller's.

The projection to the vocabulary is no such layer: SGLang multiplies by it elsewhere.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fl_dispatch.hosting.layer_kernels import KERNEL, LayerKernel
from fl_dispatch.hosting.survey import LayerChoice
from fl_dispatch.settings import get_settings

MODULE = "sglang.srt.layers.linear"
NAMES = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "MergedColumnParallelRepeatedLinear",
)
"""SGLang's classes of linear layers, by which lists of out-of-tree layers name them."""
METHOD = "UnquantizedLinearMethod"
UNREGISTERED = "the settings leave it to SGLang"
PACKED = "its weight is packed for SGLang's own kernel"


class Product(LayerKernel):
    """The product of one layer."""

    fl_operator = "linear"
    fl_weights = ("weight",)

    def fl_name(self, layer: nn.Module) -> str:
        return type(layer).__name__

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product."""
        return self.fl_call(x, layer.weight, bias)


def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product that ``UnquantizedLinearMethod.apply`` computes."""
    result: Tensor = vars(layer)[KERNEL.name].fl_call(x, layer.weight, bias)
    return result


def install(layer: nn.Module) -> LayerChoice | None:
    """Let a layer multiply by the operator, if its weight is not quantized.

    Returns:
        SGLang's choice beside ours; ``None`` if this is no such layer.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    method: Any = getattr(layer, "quant_method", None)
    if not isinstance(layer, LinearBase) or type(method) is not UnquantizedLinearMethod:
        return None
    kept = ""
    names = [base.__name__ for base in type(layer).__mro__ if base.__name__ in NAMES]
    if not get_settings().registers(*names, Product.fl_operator):
        kept = UNREGISTERED
    elif getattr(layer, "use_intel_amx_backend", False):
        kept = PACKED
    else:
        KERNEL.give(layer, Product())
        vars(method)["apply"] = apply
    return LayerChoice(type(layer).__name__, 1, (Product.fl_operator,), METHOD, kept)
