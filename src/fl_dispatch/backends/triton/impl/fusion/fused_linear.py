"""Products of one row with the norm before and the gate after them, fused into the kernel that reads the weight.

In a decode step of one request memory is idle while small kernels run between the products. A program multiplies a few
columns element by element, as in :mod:`..products.linear`, and computes the norm itself: it accumulates the sum of
squares along with the product and scales at the end, so nothing waits for the sum. Rows stay unquantized even if the
weight is quantized.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.errors import NotSupported
from fl_dispatch.ops.quantization import FP4

from ..launch import compiles, fitting
from ..products.prefetch import after, ask
from ..rows.activation import gated as gated_product


class Form(NamedTuple):
    """Form of a product.

    Attributes:
        columns: columns of the weight that a program has if that makes ``enough`` programs; otherwise it has one.
        at_once: bytes of a column that a program multiplies at a time.
        warps: warps of a program.
        enough: fewest programs for which each takes several columns.
    """

    columns: int
    at_once: int
    warps: int
    enough: int


FORMS: dict[tuple[int, bool], Form | None] = {
    (1, False): Form(2, 2048, 2, 512),
    (1, True): None,
    (2, False): Form(4, 4096, 4, 1536),
    (2, True): Form(4, 2048, 1, 768),
}
"""Bytes of a weight's element (at most two) and whether the row is normalized → the form, if fusion is faster."""
APART = "norms of rows for such a weight, which are faster by themselves"
UNIT = 16
"""Bytes of a column that one thread sums."""


@triton.jit
def _places(first, columns, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """Return the weight's columns for result columns from ``first`` on; with a gate, gate and up alternate."""
    if GATED:
        place = tl.arange(0, COLUMNS * 2)
        there = tl.minimum(first + place // 2, columns - 1) + place % 2 * columns
    else:
        there = tl.minimum(first + tl.arange(0, COLUMNS), columns - 1)
    return there.to(tl.int64)


@triton.jit
def _finish(
    y, scale, bias, out, there, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr
):
    """Return columns of the result: sums of products, scaled, with bias and gate."""
    if SCALE == 2:
        y *= tl.load(scale + there).to(tl.float32)
    elif SCALE == 1:
        y *= tl.load(scale).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + there).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (COLUMNS, 2)))
        y = gated_product(gate, up, "silu")
    return y


@triton.jit
def _row(
    x,
    residual,
    norm_weight,
    weight,
    scale,
    bias,
    out,
    total_out,
    next_weight,
    inner,
    columns,
    WEIGHT_ROW,
    SIZE,
    SLICE,
    FIRST,
    NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASKS: tl.constexpr,
):
    """Grid: tiles of the result's ``columns``; with ``GATED``, two columns of the weight, gate and up, make one.

    ``SCALE``: 0 for no scale, 1 for one of all columns, 2 for one of each column. ``SIZE`` to ``FIRST``, ``ASKS``: see
    :mod:`..products.prefetch`. The program of the first columns writes ``total_out``.
    """
    TILE: tl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    UNITS: tl.constexpr = BLOCK // UNIT
    first = tl.program_id(0) * COLUMNS
    there = _places(first, columns, COLUMNS, GATED)
    element = tl.arange(0, BLOCK)
    source = weight + there[:, None] * WEIGHT_ROW + element[None, :]
    acc = tl.zeros([TILE, UNITS], dtype=tl.float32)
    squares = tl.zeros([UNITS], dtype=tl.float32)
    written = tl.where(tl.program_id(0) == 0, inner, 0)
    for start in range(0, inner, BLOCK):
        inside = start + element < inner
        if EVEN:
            b = tl.load(source + start, eviction_policy="evict_first")
            a = tl.load(x + start + element).to(tl.float32)
        else:
            b = tl.load(source + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(x + start + element, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            a += tl.load(residual + start + element, mask=inside, other=0.0).to(tl.float32)
            tl.store(total_out + start + element, a.to(total_out.dtype.element_ty), mask=start + element < written)
        if NORM:
            squares += tl.sum((a * a).reshape(UNITS, UNIT), axis=1)
            a *= tl.load(norm_weight + start + element, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum((b.to(tl.float32) * a[None, :]).reshape(TILE, UNITS, UNIT), axis=2)
    y = tl.sum(acc, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / inner + EPSILON)
    y = _finish(y, scale, bias, out, there, SCALE, HAS_BIAS, COLUMNS, GATED)
    column = first + tl.arange(0, COLUMNS)
    tl.store(out + column, y, mask=column < columns)
    if ASKS:
        ask(next_weight, SIZE, SLICE, FIRST)


_launch_row = Launcher(_row)


def supports(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    *others: object,
) -> bool | str:
    """Check for one row, and for weights that are unquantized or fp8 with at most one scale a column."""
    if x.shape[:-1].numel() != 1:
        return "more than one row, or none"
    if x.dtype is torch.float64:
        return "float64"
    if any(one is not None and one.stride(-1) != 1 for one in (x, weight, bias, norm_weight, residual)):
        return "elements of a row, of a column or of another vector that do not lie side by side"
    if weight.dtype in (torch.uint8, torch.int8, FP4) or (scale is not None and scale.shape[1] > 1) or zero is not None:
        return "numbers of 4 bits, int8, zero points, and scales of groups"
    if norm_weight is not None and FORMS[min(weight.element_size(), 2), True] is None:
        return APART
    return compiles(weight.dtype, weight.device)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.fused_linear.fused_linear`."""
    columns, inner = weight.shape
    columns = columns // 2 if gated else columns
    out = x.new_empty((*x.shape[:-1], columns))
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    tensors = (
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if scale is None else scale.contiguous(),
        x if bias is None else bias,
        out,
        out if residual is None else total,
    )
    kinds = (
        norm_weight is not None, residual is not None, epsilon, 0 if scale is None else min(2, scale.numel()),
        bias is not None, gated,
    )  # fmt: skip
    form = FORMS[min(weight.element_size(), 2), norm_weight is not None]
    if form is None:
        raise NotSupported(APART)
    most = max(1, form.columns // 2) if gated else form.columns
    at_once = most if columns >= most * form.enough else 1
    programs = -(-columns // at_once)
    block = fitting(inner, form.at_once // weight.element_size())
    upcoming, where, asks = after(weight, programs)
    numbers = (
        inner, columns, weight.stride(0), *where, *kinds, inner % block == 0, min(UNIT // weight.element_size(), block),
        block, at_once, asks,
    )  # fmt: skip
    _launch_row((programs, 1, 1), (*tensors, upcoming), numbers, warps=form.warps)
    return out, total
