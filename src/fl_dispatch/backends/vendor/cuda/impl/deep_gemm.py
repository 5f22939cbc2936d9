"""Products of fp8 with blocks by DeepGEMM, which compiles a kernel for each new size.

Compilation takes seconds. ``DG_JIT_CACHE_DIR`` or the user's home directory stores the kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from fl_dispatch.backends.vendor.cuda import library

from .quantization import GROUP, why_no_product


@functools.cache
def _kernel() -> Callable[..., None]:
    """DeepGEMM's function, from the first module that can be imported, as in vLLM."""
    modules = library.deep_gemm()
    for module in modules:
        try:
            multiply: Callable[..., None] = importlib.import_module(module).fp8_gemm_nt
        except ImportError:
            if module == modules[-1]:
                raise
        else:
            return multiply
    raise ImportError(f"there is no {' or '.join(library.DEEP_GEMM)}")


def supports(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> bool | str:
    """fp8 in blocks of 128 with results in bfloat16."""
    if block_size != GROUP:
        return (
            f"the kernel has blocks of {GROUP} only, not of {block_size}" if block_size else "the weight has no blocks"
        )
    if dtype != "bfloat16":
        return f"the result is {dtype}, not bfloat16"
    return why_no_product(x, x_scale, weight, weight_scale, bias, dtype, True) or True


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    block_size: int = 0,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantization.scaled_linear`."""
    columns, inner = weight.shape
    out: Tensor = x.new_empty((*x.shape[:-1], columns), dtype=torch.bfloat16)
    if out.numel():
        rows = x.reshape(-1, inner).contiguous(), x_scale.reshape(-1, x_scale.shape[-1]).contiguous()
        kept = weight, weight_scale.contiguous()
        _kernel()(rows, kept, out.view(-1, columns), disable_ue8m0_cast=True)  # scales stay float32
        if bias is not None:
            out += bias
    return out
