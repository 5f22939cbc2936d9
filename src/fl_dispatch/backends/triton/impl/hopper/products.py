"""Products on tensor cores: the register layout of scores and sums, and the product that begins a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

ROWS = gl.constexpr(64)
"""Rows of a product by one group of warps."""


@gluon.constexpr_function
def mma_layout(columns, size=2):
    """Layout of a product ``[ROWS, columns]`` of four warps; its operands have ``size`` bytes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 // size])


@gluon.jit
def start_scores(q, k, KEYS: gl.constexpr, REST: gl.constexpr):
    """Start ``q @ k.T``, the scores before scaling; with ``REST`` both parts of the tiles."""
    qk = gl.zeros([ROWS, KEYS], gl.float32, mma_layout(KEYS))
    qk = warpgroup_mma(q.main, k.main.permute((1, 0)), qk, use_acc=False, is_async=True)
    if REST:
        qk = warpgroup_mma(q.rest, k.rest.permute((1, 0)), qk, is_async=True)
    return qk


@gluon.jit
def scale_rows(acc, factor):
    """Multiply each row of the sums by its factor."""
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
