"""Limits on tensors that the documentation of ``torch_npu`` states."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
LARGEST_COUNT = 2**31 - 1
"""Most elements of a cache that a kernel can address."""


def named(dtypes: tuple[torch.dtype, ...]) -> str:
    """Dtypes in the form of messages, such as ``float16 or bfloat16``."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def problem(
    kernel: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS, like: Tensor | None = None
) -> str:
    """Return why a kernel cannot take this tensor, or an empty string. With ``like`` both must have the same dtype."""
    if tensor.dtype not in dtypes:
        return f"{name} is {named((tensor.dtype,))}; {kernel} takes {named(dtypes)}"
    if like is not None and tensor.dtype is not like.dtype:
        return f"{name} is {named((tensor.dtype,))}; {kernel} takes it as {named((like.dtype,))} only, as the input"
    return ""
