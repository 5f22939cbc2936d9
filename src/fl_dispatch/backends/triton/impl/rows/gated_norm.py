"""RMS normalization with a gate; a program holds whole groups of elements, so each element is read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from ..launch import power_of_two
from .normalization import TILE, WIDEST


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x,
    gate,
    weight,
    out,
    rows,
    X_OUTER,
    X_INNER,
    GATE_OUTER,
    GATE_INNER,
    INNER: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < SIZE)
    outer, inner = row // GROUPS // INNER, row // GROUPS % INNER
    place = row % GROUPS * SIZE + column
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    y = tl.load(x + outer * X_OUTER + inner * X_INNER + place, mask=inside, other=0.0).to(wide)
    by = tl.load(gate + outer * GATE_OUTER + inner * GATE_INNER + place, mask=inside, other=0.0).to(wide)
    factor = tl.sigmoid(by)
    if SILU:
        factor *= by
    if not NORM_FIRST:
        y *= factor
    y *= tl.rsqrt(tl.sum(y * y, axis=1)[:, None] / SIZE + EPSILON)
    if HAS_WEIGHT:
        y *= tl.load(weight + place, mask=inside, other=0.0).to(wide)
    if NORM_FIRST:
        y *= factor
    tl.store(out + row * SIZE + column, y.to(out.dtype.element_ty), mask=inside)


_launch = Launcher(_gated_norm)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    activation: str = "silu",
    group_size: int = 0,
    norm_first: bool = True,
) -> Tensor:
    """See :data:`fl_dispatch.ops.normalization.rms_norm_gated`."""
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"there is no activation '{activation}' here, only silu and sigmoid")
    hidden = x.shape[-1]
    size = group_size or hidden
    if size > WIDEST:
        raise NotSupported(f"rows of {size} elements; a program holds at most {WIDEST}")
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    (x, *of_x), (gate, *of_gate) = _rows(x), _rows(gate)
    groups, block = hidden // size, power_of_two(size)
    together = max(1, TILE // block)
    rows = x.numel() // size
    if weight is not None and weight.stride(0) != 1:
        weight = weight.contiguous()
    _launch(
        (-(-rows // together), 1, 1),
        (x, gate, x if weight is None else weight, out),
        (
            *of_x,
            *of_gate,
            x.shape[1] if x.dim() == 3 else 1,
            groups,
            size,
            epsilon,
            weight is not None,
            activation == "silu",
            norm_first,
            together,
            block,
        ),
        sizes=(rows,),
        warps=4 if block <= 4096 else 8 if block <= 8192 else 16,
    )
    return out


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor of two or three dimensions with contiguous rows, and the strides of its leading dimensions."""
    if x.dim() not in (2, 3):
        x = x.reshape(-1, x.shape[-1])
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.stride(0), x.stride(1) if x.dim() == 3 else 0
