"""RMS normalizations; a program holds whole rows, so each element is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported

from ..launch import power_of_two, row_warps

WIDEST = 65536
"""Most elements of a row that a program can hold."""
TILE = 2048
"""Fewest elements of a program, which takes several rows if they are short."""
MANY_ROWS = tl.constexpr(4096)
"""Fewest rows with the hint to cache overwritten rows: 2 to 4 % faster; with fewer rows up to 11 % slower."""


@triton.jit
def _both(x, residual, inside, EVICTION: tl.constexpr):
    """Load rows of the argument and of the residual, in their dtypes."""
    left = tl.load(x, mask=inside, other=0.0, eviction_policy=EVICTION)
    right = tl.load(residual, mask=inside, other=0.0, eviction_policy=EVICTION)
    return left, right


@triton.jit
def normalized(
    x,
    residual,
    weight,
    total_out,
    rows,
    source,
    target,
    columns,
    inside,
    HIDDEN: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GEMMA: tl.constexpr,
):
    """Return a program's normalized rows in the dtype of ``x``; with a residual, write the sum to ``total_out``.

    ``source``: offsets of the elements in ``x``; ``target``: in the residual and in ``total_out``.
    """
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    if HAS_WEIGHT:  # loaded first, so that its latency overlaps with the reduction
        scale = tl.load(weight + columns, mask=columns < HIDDEN, other=0.0)
    if HAS_RESIDUAL:
        if rows >= MANY_ROWS:
            left, right = _both(x + source, residual + target, inside, "evict_last")
        else:
            left, right = _both(x + source, residual + target, inside, "")
        total = left.to(wide) + right.to(wide)
        tl.store(total_out + target, total.to(total_out.dtype.element_ty), mask=inside)
    else:  # always this hint, because ptxas would wait between the loads of a choice
        total = tl.load(x + source, mask=inside, other=0.0, eviction_policy="evict_last").to(wide)
    mean = tl.sum(total * total, axis=1)[:, None] / HIDDEN
    y = total * tl.rsqrt(mean + EPSILON)
    if HAS_WEIGHT:
        if GEMMA:
            y = y * (1.0 + scale.to(wide))
        else:
            if scale.dtype == x.dtype.element_ty:  # rounded before the product, as in the reference
                y = y.to(scale.dtype).to(wide)
            y = y * scale.to(wide)
    return y.to(x.dtype.element_ty)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    residual,
    weight,
    out,
    total_out,
    rows,
    OUTER_STRIDE,
    INNER_STRIDE,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GEMMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < HIDDEN)
    source = (row // INNER) * OUTER_STRIDE + (row % INNER) * INNER_STRIDE + columns
    target = row * HIDDEN + columns
    y = normalized(
        x, residual, weight, total_out, rows, source, target, columns, inside, HIDDEN, EPSILON, HAS_RESIDUAL,
        HAS_WEIGHT, GEMMA,
    )  # fmt: skip
    tl.store(out + target, y, mask=inside)


_launch = Launcher(_norm)


def _normalized(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float, gemma: bool
) -> Tensor | tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    if hidden > WIDEST:
        raise NotSupported(f"rows of {hidden} elements; a program holds at most {WIDEST}")
    outer, inner_stride, inner = hidden, 0, 1
    contiguous = x.is_contiguous()
    if not contiguous:
        if x.stride(-1) == 1 and x.dim() == 2:
            outer = x.stride(0)
        elif x.stride(-1) == 1 and x.dim() == 3:
            outer, inner_stride, inner = x.stride(0), x.stride(1), x.shape[1]
        else:
            x = x.contiguous()
    out = x
    total = x
    if residual is None:
        out = x.new_empty(x.shape)
    elif contiguous and residual.is_contiguous():
        # The caller allows overwriting both, but a compiled graph may have to copy the sum into the residual.
        total = x.new_empty(x.shape) if torch.compiler.is_compiling() else residual
    else:
        residual = residual.contiguous()
        out, total = (x.new_empty(x.shape) for _ in range(2))
    rows = x.numel() // hidden if hidden else 0
    if rows:
        block = power_of_two(hidden)
        together = max(1, TILE // block)
        if weight is not None and weight.stride(0) != 1:
            weight = weight.contiguous()
        _launch(
            (-(-rows // together), 1, 1),
            (x, x if residual is None else residual, x if weight is None else weight, out, total),
            (
                outer,
                inner_stride,
                inner,
                hidden,
                epsilon,
                residual is not None,
                weight is not None,
                gemma,
                together,
                block,
            ),
            sizes=(rows,),
            warps=row_warps(block),
        )
    return out if residual is None else (out, total)


def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.rms_norm`. With a residual, contiguous arguments are overwritten.

    While Dynamo traces, the residual is not overwritten.
    """
    return _normalized(x, residual, weight, epsilon, False)


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.normalization.gemma_rms_norm`. Contiguous arguments are overwritten."""
    return _normalized(x, residual, weight, epsilon, True)
