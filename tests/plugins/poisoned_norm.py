"""A norm that gives NaN for the rows of one token, so for one request alone, as often as ``POISON_TIMES`` says.

The token's row of embeddings is in the file ``POISON``; only the norm before the first layer sees it. ``POISON_RANK``
names the rank that is wrong, if not all are.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.ops import OPERATORS

LEFT = [int(os.environ["POISON_TIMES"])] if "POISON_TIMES" in os.environ else []
"""How often it still poisons; empty for always, which a captured graph can hold."""
SUBJECT = torch.load(os.environ["POISON"]) if "POISON" in os.environ else torch.zeros(0)
MARKS = {dtype: SUBJECT[:8].to(dtype).tolist() for dtype in (torch.float32, torch.bfloat16, torch.float16)}
"""The row's first elements as numbers, which a graph that a GPU captures may hold; a tensor of the CPU it may not."""


def rms_norm(x: Any, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    poisoned = None
    if residual is None and x.shape[-1:] == SUBJECT.shape:
        marked = [x[..., place] == mark for place, mark in enumerate(MARKS[x.dtype])]
        poisoned = torch.stack(marked).all(0).unsqueeze(-1)
    result = OPERATORS["rms_norm"].reference(x, residual, weight, epsilon)
    if poisoned is None or not _is_wrong_here():
        return result
    if LEFT:
        if not LEFT[0] or not bool(poisoned.any()):
            return result
        LEFT[0] -= 1
    return torch.where(poisoned, torch.nan, result)


def _is_wrong_here() -> bool:
    rank = os.environ.get("POISON_RANK")
    return rank is None or int(rank) == torch.distributed.get_rank()


def register_builtins(registry: Any) -> None:
    registry.register_impl(OpImpl("rms_norm", "vendor.poison", BackendImplKind.VENDOR, rms_norm, vendor="poison"))
