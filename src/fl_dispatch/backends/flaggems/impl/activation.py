"""FlagGems' activations."""

from __future__ import annotations

from torch import Tensor

from fl_dispatch.backends.flaggems.library import gems

from .limits import problem


def supports(x: Tensor) -> bool | str:
    """Check for a half or single precision tensor."""
    return problem("x", x) or True


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    result: Tensor = gems().silu_and_mul(*x.chunk(2, dim=-1))
    return result.contiguous()  # FlagGems keeps the memory order of swapped batch dimensions


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    result: Tensor = gems().gelu_and_mul(*x.chunk(2, dim=-1), approximate)
    return result.contiguous()
