"""The limits that all of the compiled kernels set to a tensor, and the dtype that they compute well in."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
VECTOR = 8
"""Elements that the kernels handle at a time, without a remainder."""


def problem(name: str, tensor: Tensor, like: Tensor | None = None, contiguous: bool = True) -> str:
    """Why the kernels cannot take this tensor, or an empty string. With ``like`` both must have one dtype."""
    if not tensor.is_cpu:
        return f"{name} is on {tensor.device}, not on the CPU"
    if like is not None and tensor.dtype is not like.dtype:
        return f"{name} is {tensor.dtype}, not {like.dtype}"
    if tensor.dtype not in DTYPES:
        return f"{name} is {tensor.dtype}, not float32, float16 or bfloat16"
    if contiguous and not tensor.is_contiguous():
        return f"{name} is not contiguous"
    return ""


def rounds(dtype: torch.dtype) -> bool:
    """Whether the kernels round their results to this dtype; see :func:`_truncates`."""
    return dtype is not torch.bfloat16 or not _truncates()


def widened(x: Tensor) -> Tensor:
    """The tensor, in float32 where the kernels would truncate a result of its dtype."""
    return x if rounds(x.dtype) else x.float()


def narrowed(wide: Tensor, into: Tensor) -> Tensor:
    """``into``, overwritten with the widened tensor unless they are one."""
    return into if wide is into else into.copy_(wide)


@functools.cache
def _truncates() -> bool:
    """Whether the loaded kernels cut results off to bfloat16, as builds for processors without AVX512-BF16 do."""
    x, residual = torch.ones(VECTOR, dtype=torch.bfloat16), torch.full((VECTOR,), 1.5 * 2.0**-8, dtype=torch.bfloat16)
    torch.ops._C.fused_add_rms_norm(x, residual, None, 1e-6)
    return bool((residual == 1.0).any())  # the next larger number is nearer
