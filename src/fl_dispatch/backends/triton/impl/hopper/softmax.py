"""An online softmax in base 2 over tiles of scores, and its weights as a product takes them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def softmax(scores, top, below, start, place, length, factor, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Weights of a tile, and what its largest scores make of the sums before it."""
    if MASKED:
        column = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        seen = (start + column < length)[None, :]
        if CAUSAL:
            seen = seen & (start + column[None, :] <= place[:, None])
        # Finite, so that rows which see nothing here have no NaN; tiles come from the last to the first, and what such
        # a row adds is scaled by 0 once it sees a key.
        scores = gl.where(seen, scores * factor, -1e30)
        new_top = gl.maximum(top, gl.max(scores, axis=1))
        weights = gl.exp2(scores - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.max(scores, axis=1) * factor)
        weights = gl.exp2(scores * factor - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, new_top, below * decay + gl.sum(weights, axis=1), decay


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """Weights as they are carried around a loop: two in a number of 32 bits, which is how a product takes them."""
    low, high = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    CVT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CVT, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, dtype: gl.constexpr, P: gl.constexpr):
    """The operand of a product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    half = gl.cast(gl.reshape(gl.join(low, high), [packed.shape[0], packed.shape[1] * 2]), dtype, bitcast=True)
    return gl.convert_layout(half, P)
