"""The limits that the documentation of ``torch_npu`` sets to a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
LARGEST_COUNT = 2**31 - 1
"""Elements of a cache that a kernel can count."""


def named(dtypes: tuple[torch.dtype, ...]) -> str:
    """Dtypes as a message has them, such as ``float16 or bfloat16``."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def problem(
    kernel: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS, like: Tensor | None = None
) -> str:
    """Why a kernel cannot take this tensor, or an empty string. With ``like`` both must have one dtype."""
    if tensor.dtype not in dtypes:
        return f"{name} is {named((tensor.dtype,))}; {kernel} takes {named(dtypes)}"
    if like is not None and tensor.dtype is not like.dtype:
        return f"{name} is {named((tensor.dtype,))}; {kernel} takes it as {named((like.dtype,))} only, as the input"
    return ""
