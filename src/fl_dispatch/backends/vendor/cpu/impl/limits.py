"""The limits that all of the compiled kernels set to a tensor, and the dtype that they compute well in."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import library

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
    """Whether the kernels round their results to this dtype; see :func:`..library.truncates`."""
    return dtype is not torch.bfloat16 or not library.truncates()


def widened(x: Tensor) -> Tensor:
    """The tensor, in float32 where the kernels would truncate a result of its dtype."""
    return x if rounds(x.dtype) else x.float()


def narrowed(wide: Tensor, into: Tensor) -> Tensor:
    """``into``, overwritten with the widened tensor unless they are one."""
    return into if wide is into else into.copy_(wide)
