"""The limits that all of the compiled operators set to a tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fl_dispatch.devices import CUDA

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def problem(name: str, tensor: Tensor, like: Tensor | None = None, contiguous: bool = True) -> str:
    """Why the operators cannot take this tensor, or an empty string. With ``like`` both must have one dtype."""
    if not tensor.is_cuda:
        return f"{name} is on {tensor.device}, not on a GPU"
    if like is not None and tensor.dtype is not like.dtype:
        return f"{name} is {tensor.dtype}, not {like.dtype}"
    if tensor.dtype not in DTYPES:
        return f"{name} is {tensor.dtype}, not float32, float16 or bfloat16"
    if contiguous and not tensor.is_contiguous():
        return f"{name} is not contiguous"
    return ""


@functools.cache
def capability(index: int) -> int:
    """The compute capability of a GPU as vLLM's operators take it: 90 for 9.0; 0 if unknown."""
    major, minor = CUDA.capability(index) or (0, 0)
    return 10 * major + minor
