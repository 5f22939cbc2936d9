"""Rows in global memory: copies into shared memory, and stores of results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .aggregates import aggregate

# Triton 3.9 names this function differently.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@aggregate
class Rows:
    """A tensor ``[tokens, heads, …]`` with a contiguous last dimension."""

    pointer: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor

    @gluon.jit
    def offsets(self, token, head):
        """Offsets of the rows of tokens and heads."""
        return token.to(gl.int64) * self.token_stride + head.to(gl.int64) * self.head_stride


@gluon.constexpr_function
def copy_layout(warps, size=2):
    """Return the layout of copies, 16 bytes a thread, elements of ``size`` bytes: a warp takes 4 rows of 128 bytes."""
    return gl.BlockedLayout([1, 16 // size], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def copy_rows(buffer, source, rows, mask, FIRST: gl.constexpr, SIZE: gl.constexpr, L: gl.constexpr):
    """Start to copy ``SIZE`` elements, from ``FIRST`` on, of each row; rows outside the mask become 0."""
    column = FIRST + gl.arange(0, SIZE, layout=gl.SliceLayout(0, L))
    # Strides are multiples of 16, which Triton 3.8 forgets if a loop carries the rows.
    offset = gl.multiple_of(rows[:, None], [16, 16])
    async_load(buffer, source + offset + column[None, :], mask=mask[:, None])


@gluon.jit
def copy_tile(tile, source, rows, mask, FIRST: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, L: gl.constexpr):
    """Start to copy both parts of a tile, ``MAIN`` and ``REST`` elements, from ``FIRST`` on."""
    copy_rows(tile.main, source, rows, mask, FIRST, MAIN, L)
    if REST > 0:
        copy_rows(tile.rest, source, rows, mask, FIRST + MAIN, REST, L)


@gluon.constexpr_function
def store_layout(rows, columns):
    """Return an accumulator's layout changed for stores: a thread has 16 contiguous bytes, so four threads write 64."""
    wide = [[0, column] for column in (32, 64, 128) if column < columns]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *wide],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [rows, columns],
    )


@gluon.jit
def store_rows(out, acc, work, token, head, FIRST: gl.constexpr, L: gl.constexpr):
    """Write rows of results to ``out``, at tokens within a request and heads, in columns from ``FIRST`` on.

    ``L`` is :func:`store_layout`; ``token`` and ``head`` have its slice.
    """
    column = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, L))
    target = out.pointer + out.offsets(work.begin + token, head)[:, None] + column[None, :]
    gl.store(target, gl.convert_layout(acc.to(out.pointer.dtype.element_ty), L), mask=(token < work.new)[:, None])
