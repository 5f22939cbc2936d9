"""Gated activations: one program for each row and block of columns; each value is read or written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher

BLOCK = 1024


@triton.jit
def _gelu_half(x):
    """``gelu`` for results of a half type: Hastings' formula of the error function (Abramowitz and Stegun, 7.1.26),
    half of the instructions of ``tl.erf`` and an error of 1.5e-7.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    p = 1.061405429 * t - 1.453152027
    p = p * t + 1.421413741
    p = p * t - 0.284496736
    p = p * t + 0.254829592
    tail = 0.5 * p * t * tl.exp2(z * z * -1.4426950408889634)  # of the normal distribution, beyond abs(x)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return the activated gate times ``up``, rounded once, to their dtype."""
    wide: tl.constexpr = tl.float64 if gate.dtype == tl.float64 else tl.float32
    narrow: tl.constexpr = up.dtype
    gate = gate.to(wide)
    if ACTIVATION == "silu":
        y = gate * tl.sigmoid(gate)
    elif ACTIVATION == "none" and narrow.primitive_bitwidth == 16:
        y = _gelu_half(gate)
    elif ACTIVATION == "none":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # 0.5 * (1 + tanh(u)) = sigmoid(2 * u)
        y = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (y * up.to(wide)).to(narrow)


@triton.jit
def _gated(x, out, ROW_STRIDE, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = x + row * ROW_STRIDE
    gate = tl.load(start + columns, mask=inside, other=0.0)
    up = tl.load(start + WIDTH + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, gated(gate, up, ACTIVATION), mask=inside)


_launch = Launcher(_gated)


def _apply(x: Tensor, activation: str) -> Tensor:
    *leading, double = x.shape
    width = double // 2
    out = x.new_empty((*leading, width))
    if len(leading) != 1:
        x = x.reshape(-1, double)
    row_stride, stride = x.stride()
    if stride != 1:
        x, row_stride = x.contiguous(), double
    rows = x.shape[0]
    if rows and width:
        _launch((rows * -(-width // BLOCK), 1, 1), (x, out), (row_stride, width, activation, BLOCK))
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See :data:`fl_dispatch.ops.activation.silu_and_mul`."""
    return _apply(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :data:`fl_dispatch.ops.activation.gelu_and_mul`."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}, not 'none' or 'tanh'")
    return _apply(x, approximate)
