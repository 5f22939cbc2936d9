"""The kernel for latent attention over listed rows: a query counts as a request with its list as the keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...attention.requests import request_of
from ..aggregates import aggregate
from ..pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from ..rows import Rows
from .consumer import Partial, consume
from .kernel import alloc
from .producer import produce
from .work import KEYS, PRODUCER_WARPS, Config, Items


@aggregate
class ListedRows:
    """Latent rows ``[block, slot, rank + rotary]``, each request's blocks, and the rows that each query lists."""

    pointer: gl.tensor
    block_stride: gl.tensor
    slot_stride: gl.tensor
    table: gl.tensor
    table_stride: gl.tensor
    positions: gl.tensor
    list_stride: gl.tensor
    query_starts: gl.tensor
    requests: gl.tensor
    steps: gl.constexpr

    @gluon.jit
    def request(self, work):
        """Return the index of the request of an item's query."""
        return request_of(self.query_starts, work.request, self.requests, self.steps)

    @gluon.jit
    def blocks(self, work, request, tile, BLOCK_SIZE: gl.constexpr, L: gl.constexpr):
        """Numbers of the slots with a tile's keys, of all slots of the cache."""
        place = work.start + tile * KEYS + gl.arange(0, KEYS, layout=L)
        inside = (tile >= 0) & (place < work.stop)
        listed = self.positions + work.request.to(gl.int64) * self.list_stride
        position = gl.load(listed + place, mask=inside, other=0).to(gl.int32)
        table = self.table + request.to(gl.int64) * self.table_stride
        block = gl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(gl.int32)
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    @gluon.jit
    def rows(self, slots, place, BLOCK_SIZE: gl.constexpr):
        """Offsets of the keys' rows."""
        block = (slots // BLOCK_SIZE).to(gl.int64) * self.block_stride
        return block + (slots % BLOCK_SIZE).to(gl.int64) * self.slot_stride


# Triton's launcher takes only numbers and tensors, so the aggregates are made here.
@gluon.jit(do_not_specialize=["tiles", "tokens", "requests", "splits", "TABLE_ROW"])
def listed_attention(
    query,
    query_rope,
    cache,
    positions,
    counts,
    block_table,
    query_starts,
    out,
    partial,
    statistics,
    tiles,
    tokens,
    requests,
    splits,
    TABLE_ROW,
    QUERY_TOKEN,
    QUERY_HEAD,
    ROPE_TOKEN,
    ROPE_HEAD,
    CACHE_BLOCK,
    CACHE_SLOT,
    LIST_TOKEN,
    OUT_TOKEN,
    OUT_HEAD,
    SCALE,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STEPS: gl.constexpr,
    DIVIDED: gl.constexpr,
    PERSISTENT: gl.constexpr,
):
    """Grid: the items of work, a tile of ``ROWS`` heads of a query or its share; persistent programs share them.

    A query attends to the first ``counts`` rows of its list. Each program has all of a processor's memory.
    """
    config = Config(HEADS, BLOCK_SIZE, False, 1, DIVIDED, True, PERSISTENT)
    pipeline = alloc(query.dtype.element_ty)
    queries = Rows(query, gl.to_tensor(QUERY_TOKEN), gl.to_tensor(QUERY_HEAD))
    rotary = Rows(query_rope, gl.to_tensor(ROPE_TOKEN), gl.to_tensor(ROPE_HEAD))
    results = Rows(out, gl.to_tensor(OUT_TOKEN), gl.to_tensor(OUT_HEAD))
    parts = Partial(partial, statistics, splits)
    items = Items(query_starts + requests, counts, tiles, tokens, splits)
    latents = ListedRows(
        cache, gl.to_tensor(CACHE_BLOCK), gl.to_tensor(CACHE_SLOT), block_table, TABLE_ROW, positions,
        gl.to_tensor(LIST_TOKEN), query_starts, requests, STEPS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (config, pipeline, items, results, parts, SCALE, 0)),
            (consume, (config, pipeline, items, results, parts, SCALE, 1)),
            (produce, (config, pipeline, items, queries, rotary, latents, 0)),
            (produce, (config, pipeline, items, queries, rotary, latents, 1)),
        ],
        [4, PRODUCER_WARPS, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
