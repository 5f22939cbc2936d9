"""Limits on tensors that all compiled kernels share, and the dtype in which they round."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ... import compiled_by_vllm
from .. import library

VECTOR = 8
"""Elements of a vector in the kernels, which do not handle remainders."""
problem = partial(compiled_by_vllm.problem, "cpu")
"""Why the kernels cannot take a tensor, or an empty string."""


def rounds(dtype: torch.dtype) -> bool:
    """Whether the kernels round their results to this dtype; see :func:`..library.truncates`."""
    return dtype is not torch.bfloat16 or not library.truncates()


def widened(x: Tensor) -> Tensor:
    """Return the tensor, in float32 if the kernels would truncate a result of its dtype."""
    return x if rounds(x.dtype) else x.float()


def narrowed(wide: Tensor, into: Tensor) -> Tensor:
    """Copy the widened tensor to ``into``, unless they are the same tensor; return ``into``."""
    return into if wide is into else into.copy_(wide)
