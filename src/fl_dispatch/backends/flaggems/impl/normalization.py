"""FlagGems' norms."""

from __future__ import annotations

from torch import Tensor

from fl_dispatch.backends.flaggems.library import gems

from .limits import problem


def supports_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> bool | str:
    """Check for a weight; with a residual, contiguous tensors of one dtype."""
    if weight is None:
        return "there is no weight"
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and (why := problem(name, tensor, contiguous=residual is not None)):
            return why
    if residual is not None and residual.dtype is not x.dtype:
        return f"residual is {residual.dtype}, x {x.dtype}"
    return True


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`. With a residual both tensors are overwritten and returned."""
    shape = [x.shape[-1]]
    if residual is not None:
        gems().fused_add_rms_norm(x, residual, shape, weight, epsilon)
        return x, residual
    result: Tensor = gems().rms_norm(x, shape, weight, epsilon)
    return result
