"""References of the gated activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return gate, up


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    gate, up = _halves(x)
    return (functional.silu(gate) * up).to(x.dtype).contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    gate, up = _halves(x)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype).contiguous()
