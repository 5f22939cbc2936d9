"""SGLang's linear layers over the operator ``linear``: products with weights that are not quantized.

A layer calls its ``quant_method`` for the product. That object stays SGLang's, because SGLang checks its class; its
``apply`` becomes a call of the operator. The product stays SGLang's if PyTorch's is the first choice; SGLang then
chooses among its own kernels as without the plugin. A product that is written into the caller's memory stays SGLang's,
too.

The projection to the vocabulary is not such a layer, because SGLang computes it elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.layers.layer_kernels import KERNEL, LayerKernel
from fl_dispatch.hosting.layers.survey import LayerChoice
from fl_dispatch.hosting.start.first_choices import has_kernel
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

logger = get_logger(__name__)

MODULE = "sglang.srt.layers.linear"
NAMES = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "MergedColumnParallelRepeatedLinear",
)
"""SGLang's classes of linear layers, by the names in lists of out-of-tree layers."""
METHOD = "UnquantizedLinearMethod"
UNREGISTERED = "the settings leave it to SGLang"
PACKED = "its weight is packed for SGLang's own kernel"
PYTORCHS = "nothing comes before PyTorch's product, which is SGLang's own"
PLAIN_BACKENDS = ("auto", "torch")
"""SGLang's kernel choices for products that are PyTorch's product."""


class Product(LayerKernel):
    """The product of one layer."""

    fl_operator = "linear"

    def __init__(self) -> None:
        super().__init__()
        # A graph would hold a form's address, and SGLang does not announce weight updates.
        self.fl_weights = () if detect_device().graphs else ("weight",)

    def fl_name(self, layer: nn.Module) -> str:
        return type(layer).__name__

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product."""
        return self.fl_call(x, layer.weight, bias)


def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product that ``UnquantizedLinearMethod.apply`` computes."""
    result: Tensor = vars(layer)[KERNEL.name].apply_weights(layer, x, bias)
    return result


def install(layer: nn.Module) -> LayerChoice | None:
    """Make a layer multiply with the operator, if its weight is not quantized.

    Returns:
        SGLang's choice and ours; ``None`` for other layers.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.utils.common import use_intel_amx_backend

    method: Any = getattr(layer, "quant_method", None)
    if not isinstance(layer, LinearBase) or type(method) is not UnquantizedLinearMethod or layer.weight.dim() != 2:
        return None  # models keep convolution weights in such layers, and never call them
    kept, backend = "", _backend()
    names = [base.__name__ for base in type(layer).__mro__ if base.__name__ in NAMES]
    if not get_settings().registers(*names, Product.fl_operator):
        kept = UNREGISTERED
    elif use_intel_amx_backend(layer):
        kept = PACKED
    elif not has_kernel(Product.fl_operator):
        kept = PYTORCHS
    else:
        KERNEL.give(layer, Product())
        vars(method)["apply"] = apply
        if backend not in PLAIN_BACKENDS:
            _say_ignored(backend)
    return LayerChoice(type(layer).__name__, 1, (Product.fl_operator,), f"{METHOD}, {backend}", kept)


def _backend() -> str:
    """Return SGLang's kernel choice for products in bfloat16, by its own name."""
    from sglang.srt.layers.quantization.unquant import get_bf16_gemm_backend

    return str(get_bf16_gemm_backend().value)


@cache
def _say_ignored(backend: str) -> None:
    logger.warning(
        "our operators compute products with weights, so SGLang's choice of a kernel for them (bf16_gemm_backend '%s') "
        "has no effect; SGLANG_FL_OOT_BLACKLIST=linear leaves them to SGLang", backend,
    )  # fmt: skip
