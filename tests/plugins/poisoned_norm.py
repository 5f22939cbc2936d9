"""A norm that gives NaN for the rows of one token, so for one request alone, as often as ``POISON_TIMES`` says.

The token's row of embeddings is in the file ``POISON``; only the norm before the first layer sees it. ``POISON_RANK``
names the rank that is wrong, if not all are.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.ops import OPERATORS

LEFT = [int(os.environ["POISON_TIMES"])] if "POISON_TIMES" in os.environ else []
"""How often it still poisons; empty for always, which a captured graph can hold."""
SUBJECT = torch.load(os.environ["POISON"]) if "POISON" in os.environ else torch.zeros(0)


@cache
def subject(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return SUBJECT.to(device, dtype)


def rms_norm(x: Any, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    poisoned = None
    if residual is None and x.shape[-1:] == SUBJECT.shape:
        poisoned = (x == subject(x.device, x.dtype)).all(-1, keepdim=True)
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
