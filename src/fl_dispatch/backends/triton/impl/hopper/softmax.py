"""An online softmax in base 2 over tiles of scores, and its weights in the layout of a product's operand."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .aggregates import aggregate

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1e30)
"""Masked score, and ``m_i`` of a row that has not seen a key: finite, to avoid NaN in such a row."""


@aggregate
class Mask:
    """The keys that queries see: those before ``stop``, and with ``causal`` those up to the query's own position."""

    position: gl.tensor
    stop: gl.tensor
    causal: gl.constexpr

    @gluon.jit
    def seen(self, qk, start_n):
        """Return which scores ``qk`` of the tile of keys from ``start_n`` on count."""
        column = gl.arange(0, qk.shape[1], layout=gl.SliceLayout(0, qk.type.layout))
        seen = (start_n + column < self.stop)[None, :]
        if self.causal:
            seen = seen & (start_n + column[None, :] <= self.position[:, None])
        return seen


@gluon.jit
def softmax(qk, m_i, l_i, start_n, mask, qk_scale, MASKED: gl.constexpr):
    """Return weights ``p`` of a tile, the rows' new maximum and sum, and ``alpha``, which rescales the earlier sums."""
    if MASKED:
        # Tiles come from the last to the first. A row that sees no key in them adds arbitrary numbers to its sums,
        # because alpha is 0 as soon as it sees a key.
        qk = gl.where(mask.seen(qk, start_n), qk * qk_scale, NOTHING)
        m_new = gl.maximum(m_i, gl.max(qk, axis=1))
        p = gl.exp2(qk - m_new[:, None])
    else:
        m_new = gl.maximum(m_i, gl.max(qk, axis=1) * qk_scale)
        p = gl.exp2(qk * qk_scale - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    return p, m_new, l_i * alpha + gl.sum(p, axis=1), alpha


@gluon.jit
def saw_keys(m_i):
    """Return which rows have seen a key."""
    return m_i > NOTHING / 10


@gluon.jit
def inverse(m_i, l_i):
    """Return the factor that ends the softmax; 0 for rows that see no key."""
    return gl.where(saw_keys(m_i), 1.0 / l_i, 0.0)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Pack softmax weights for a loop: two of a half type in an int32, as a product's operand holds them."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    CVT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CVT, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, acc, dtype: gl.constexpr):
    """Unpack weights to the first operand of a product that is added to ``acc``."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    half = gl.cast(gl.reshape(gl.join(low, high), [packed.shape[0], packed.shape[1] * 2]), dtype, bitcast=True)
    return gl.convert_layout(half, gl.DotOperandLayout(0, acc.type.layout, 2))
