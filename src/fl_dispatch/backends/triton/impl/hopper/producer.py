"""The warps that bring queries, keys and values into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .schedule import BLOCK_M, BLOCK_N, key_tiles, piece, request_span


@gluon.jit
def _hand_over(full, pending, index, LATE: gl.constexpr):
    """Give the buffer whose copies were just started to the consumers; returns what is still to be given.

    With ``LATE`` it is given when the next one is under way, behind a fence of the writers, so that consumers need
    none; else its copies give it themselves, and each consumer fences.
    """
    if LATE:
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        mbarrier.arrive(full.index(gl.maximum(pending, 0)), pred=pending >= 0)
    else:
        async_copy.mbarrier_arrive(full.index(index), increment_count=False)
    return pending * 0 + index


@gluon.jit
def produce(
    query,
    key_cache,
    value_cache,
    block_table,
    query_starts,
    key_lengths,
    buffers,
    barriers,
    requests,
    heads,
    least_new,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_BLOCK,
    KEY_SLOT,
    KEY_HEAD,
    VALUE_BLOCK,
    VALUE_SLOT,
    VALUE_HEAD,
    TABLE_ROW,
    GROUP: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    REST: gl.constexpr,
    DIM_V: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
    LATE: gl.constexpr,
):
    """Fill the buffers: a piece's queries, then its tiles of keys, the last first, each with the values of the one
    before, which is the order in which they are multiplied. Rows beyond a request's keys are 0.
    """
    ROW: gl.constexpr = gl.int32 if NARROW else gl.int64
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 8 rows of 128 bytes a warp, 16 a thread
    q_full: gl.constexpr = 2 * STAGES
    q_buf, q_rest_buf, k_bufs, k_rest_bufs, v_bufs = buffers
    full, k_free, v_free, q_free, _, _ = barriers
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    dim_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, L))
    programs = gl.num_programs(0)
    pending = -1
    i = 0
    done = 0
    count = 0
    for request in range(requests):
        begin, new, length, key_begin, tiles_m = request_span(query_starts, key_lengths, request, least_new, PAGED)
        works = tiles_m * heads
        for turn in range(count // programs, gl.cdiv(count + works, programs)):
            work, first, head = piece(turn, count, tiles_m, heads)
            tiles, _whole = key_tiles(new, length, first, CAUSAL)
            if (work >= 0) & (work < works) & (tiles > 0):
                kv_head = (head // GROUP).to(gl.int64)
                key = key_cache + kv_head * KEY_HEAD
                value = value_cache + kv_head * VALUE_HEAD
                position = (tiles - 1) * BLOCK_N + column
                if PAGED:
                    table = block_table + gl.cast(request, gl.int64) * TABLE_ROW
                    ahead = gl.load(table + position // BLOCK_SIZE, mask=position < length, other=0).to(gl.int32)
                    page_before = gl.zeros([BLOCK_N], gl.int32, gl.SliceLayout(1, L))
                else:
                    key = key + key_begin.to(gl.int64) * KEY_SLOT
                    value = value + key_begin.to(gl.int64) * VALUE_SLOT
                token = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
                source = query + ((begin + token).to(gl.int64) * QUERY_TOKEN + head * QUERY_HEAD)[:, None]
                there = (token < new)[:, None]
                mbarrier.wait(q_free, (done & 1) ^ 1)
                async_copy.async_copy_global_to_shared(q_buf, source + dim[None, :], mask=there)
                if REST > 0:
                    rest_q = DIM + gl.arange(0, REST, layout=gl.SliceLayout(0, L))
                    async_copy.async_copy_global_to_shared(q_rest_buf, source + rest_q[None, :], mask=there)
                pending = _hand_over(full, pending, q_full, LATE)
                done += 1
                for tile in range(tiles + 1):
                    # The page numbers of the next tile are asked for one tile ahead, those of the last one are kept.
                    position_before = position + BLOCK_N
                    if PAGED:
                        slot = position_before % BLOCK_SIZE
                        value_row = page_before.to(ROW) * VALUE_BLOCK + slot * VALUE_SLOT
                        page = ahead
                    else:
                        value_row = position_before.to(ROW) * VALUE_SLOT
                    if tile < tiles:
                        stage = i % STAGES
                        inside = (position < length)[:, None]
                        if PAGED:
                            later = position - BLOCK_N
                            ahead = gl.load(table + later // BLOCK_SIZE, mask=later >= 0, other=0).to(gl.int32)
                            key_row = page.to(ROW) * KEY_BLOCK + position % BLOCK_SIZE * KEY_SLOT
                        else:
                            key_row = position.to(ROW) * KEY_SLOT
                        keys = key + key_row[:, None]
                        mbarrier.wait(k_free.index(stage), ((i // STAGES) & 1) ^ 1)
                        async_copy.async_copy_global_to_shared(k_bufs.index(stage), keys + dim[None, :], mask=inside)
                        if REST > 0:
                            rest = DIM + gl.arange(0, REST, layout=gl.SliceLayout(0, L))
                            more = keys + rest[None, :]
                            async_copy.async_copy_global_to_shared(k_rest_bufs.index(stage), more, mask=inside)
                        pending = _hand_over(full, pending, stage, LATE)
                    if tile > 0:
                        before = (i - 1) % STAGES
                        values = value + value_row[:, None] + dim_v[None, :]
                        inside_before = (position_before < length)[:, None]
                        mbarrier.wait(v_free.index(before), (((i - 1) // STAGES) & 1) ^ 1)
                        async_copy.async_copy_global_to_shared(v_bufs.index(before), values, mask=inside_before)
                        pending = _hand_over(full, pending, STAGES + before, LATE)
                    if PAGED:
                        page_before = page
                    position -= BLOCK_N
                    i += 1
                i -= 1
        count += works
    if LATE:
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(gl.maximum(pending, 0)), pred=pending >= 0)
