"""Mixtures of experts with quantized weights: the steps of :mod:`.fused_moe` around tiles of quantized products.

Quantized rows are written once more between the two products, in float32 and in the order of their pairs, because a
row's scale depends on the whole row. The first fp8 product runs in float16, which holds fp8 exactly, because the error
of a 14-bit sum would change how the result is quantized. With few pairs for each expert, reading the weights hides the
cost; many pairs in bfloat16 with blocks are summed as the declaration allows. Weights with blocks that fp8 units
multiply are the left side of a product. In weight-only products, weights become a half type tile by tile in registers,
and a group's scale multiplies its sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fl_dispatch.devices.launcher import Launcher
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from fl_dispatch.ops.quantization import FP4, FP8, int8_rows, rounded
from fl_dispatch.ops.quantized_moe import NARROW_PAIRS, sums_narrow

from ..launch import compiles, power_of_two, stages_that_fit
from ..products.scaled_linear import SHORT_SUM, refused_blocks, scaled_product
from ..products.weight_only_linear import dequantized_tile, divisor, stored_numbers
from ..rows.quantization import WIDEST, quantized_rows
from .fused_moe import Plan, Plans, Tile, add_up, arrange, multiply, result, strides
from .fused_moe_kernels import _block_expert, _block_pairs, _finish, _tile, _weight_rows

SCALED_FEW = (
    (8, Plan(16, Tile(64, 128, 4, 6), Tile(64, 128, 4, 6))),
    (16, Plan(32, Tile(64, 128, 4, 5), Tile(64, 128, 4, 5))),
    (48, Plan(64, Tile(128, 128, 8, 4), Tile(128, 128, 8, 4))),
)
SCALED_PLANS = Plans(SCALED_FEW, Plan(128, Tile(128, 128, 8, 3, 8), Tile(128, 128, 8, 3, 8)))
BLOCK_FEW = (
    (1, Plan(16, Tile(64, 128, 4, 6), Tile(64, 128, 4, 6))),
    (16, Plan(16, Tile(64, 128, 4, 6), Tile(128, 128, 4, 5))),
    (NARROW_PAIRS, Plan(32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3))),
)
BLOCK_PLANS = Plans(BLOCK_FEW, Plan(64, Tile(128, 128, 4, 4, 8), Tile(128, 128, 4, 4, 8)))
"""Plans for weights with blocks."""
EXACT_BLOCK_PLANS = Plans(BLOCK_FEW, Plan(64, Tile(64, 128, 2, 4), Tile(128, 128, 4, 4, 8)))
"""Plans for many pairs with a first product in float16."""
PACKED_PLANS = Plans(
    (
        (8, Plan(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
        (16, Plan(32, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
        (48, Plan(64, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4))),
    ),
    Plan(128, Tile(128, 64, 8, 3, 8), Tile(128, 64, 8, 3, 8)),
)
"""Plans for weight-only products of half types; depths count elements."""
WIDE_PACKED_PLANS = Plans((), Plan(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)))
"""Plans for float32, because its products are exact and slow."""
LEAST_DEPTH = 16
"""Least depth of a product on matrix units; groups that it does not divide are multiplied in float32."""


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _scaled(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    sorted_ids,
    expert_ids,
    padded,
    out,
    pairs,
    blocks,
    EXPERT_STRIDE,
    WEIGHT_ROW,
    BIAS_ROW,
    SHARED: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INTEGERS: tl.constexpr,
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Quantized rows times quantized weights, a row of ``out`` for each pair. Grid: blocks times tiles of weights.

    ``SHARED`` pairs have a row of ``x`` in common. An expert has ``SCALE_ROWS`` times ``SCALES`` scales.
    """
    WIDTH: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    block, tile = _tile(tl.program_id(0), blocks, tl.cdiv(COLUMNS, BLOCK_N), TOGETHER)
    row = tl.arange(0, BLOCK_M)
    expert, idle = _block_expert(block, topk_ids, expert_map, padded, SORTED, MAPPED, BLOCK_M)
    if idle:
        return
    expert, pair, _, seen = _block_pairs(block, row, expert, sorted_ids, expert_ids, pairs, SORTED, BLOCK_M)
    weight_row = _weight_rows(tile, COLUMNS, WIDTH, GATED, ACTIVATION, BLOCK_N)
    source = tl.where(seen, pair // SHARED, 0).to(tl.int64)
    scale_row = weight_row
    if BLOCKS:
        scale_row = weight_row // BLOCKS
    rows, row_scales = x + source * INNER, x_scale + source * SCALES
    weights = weight + expert.to(tl.int64) * EXPERT_STRIDE + weight_row * WEIGHT_ROW
    weight_scales = weight_scale + (expert.to(tl.int64) * SCALE_ROWS + scale_row) * SCALES
    y = scaled_product(
        rows, weights, row_scales, weight_scales, seen, INNER, BLOCKS, INTEGERS, EXACT, SHORT, INNER % BLOCK_K == 0,
        STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    _finish(
        y, bias, topk_weights, out, expert, pair, pair, seen, weight_row, tile, BIAS_ROW, WIDTH, ACTIVATION, GATED,
        BIASED, False, WEIGHTED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _packed(
    x,
    x_scale,
    weight,
    scale,
    zero,
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    sorted_ids,
    expert_ids,
    padded,
    out,
    pairs,
    blocks,
    X_ROW,
    EXPERT_STRIDE,
    WEIGHT_ROW,
    BIAS_ROW,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    SCALED: tl.constexpr,
    STORED: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    FLOAT4: tl.constexpr,
    UNIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LATE: tl.constexpr,
    SORTED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Rows, with a scale each if ``SCALED``, times weights of ``STORED`` bytes a column, in ``GROUPS`` groups.

    Grid: as for ``_scaled``.

    Numbers of few bits are exact in a half type, so with ``LATE`` a group's scale multiplies the group's sum. The
    ``FIRST`` of both products reads tokens, each shared by ``SHARED`` pairs, and writes in sorted order; the second one
    reads in that order.
    """
    WIDTH: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    INNER: tl.constexpr = STORED * PACKED
    block, tile = _tile(tl.program_id(0), blocks, tl.cdiv(COLUMNS, BLOCK_N), TOGETHER)
    row = tl.arange(0, BLOCK_M)
    expert, idle = _block_expert(block, topk_ids, expert_map, padded, SORTED, MAPPED, BLOCK_M)
    if idle:
        return
    expert, pair, place, seen = _block_pairs(block, row, expert, sorted_ids, expert_ids, pairs, SORTED, BLOCK_M)
    weight_row = _weight_rows(tile, COLUMNS, WIDTH, GATED, ACTIVATION, BLOCK_N)
    if FIRST:
        source, target = pair // SHARED, place
    else:
        source, target = place, pair
    column = (expert.to(tl.int64) * COLUMNS + weight_row)[:, None] * GROUPS
    left = weight + expert.to(tl.int64) * EXPERT_STRIDE + weight_row[:, None] * WEIGHT_ROW
    step = tl.arange(0, BLOCK_K)
    right = x + source.to(tl.int64)[:, None] * X_ROW + step[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k in range(0, INNER, BLOCK_K):
        w = dequantized_tile(
            left, scale + column, zero + column, weight_row[:, None] >= 0, k // PACKED, STORED, INNER // GROUPS,
            HAS_ZERO, not LATE, PACKED, FLOAT4, UNIT, BLOCK_N, BLOCK_K // PACKED,
        )  # fmt: skip
        a = tl.load(right + k, mask=seen[:, None] & (step < INNER - k)[None, :], other=0.0)
        if LATE:
            part = tl.dot(w.to(a.dtype), tl.trans(a), input_precision="ieee")
            acc += part * tl.load(scale + column + k // (INNER // GROUPS)).to(tl.float32)
        else:
            acc = tl.dot(w, tl.trans(a.to(tl.float32)), acc, input_precision="ieee")
    if SCALED:
        acc *= tl.load(x_scale + source, mask=seen, other=0.0)[None, :]
    _finish(
        tl.trans(acc), bias, topk_weights, out, expert, pair, target, seen, weight_row, tile, BIAS_ROW, WIDTH,
        ACTIVATION, GATED, BIASED, FIRST and WEIGHTED, WEIGHTED and not FIRST, BLOCK_M, BLOCK_N,
    )  # fmt: skip


_launch_scaled = Launcher(_scaled)
_launch_packed = Launcher(_packed)


def _refused(hidden_states: Tensor, activation: str, out: Tensor | None, *stored: Tensor | None) -> str:
    """Return why no kernel here takes a call, or an empty string; ``stored``: a weight, then weights and biases."""
    first = stored[0]
    if activation not in GATED_ACTIVATIONS and activation not in PLAIN_ACTIVATIONS:
        return f"activation '{activation}'"
    if hidden_states.dtype is torch.float64:
        return "float64"
    if any(each is not None and each.numel() and each.stride(-1) != 1 for each in stored):
        return "elements of a row of the weights or of a bias that do not lie side by side"
    if out is not None and out.numel() and out.stride(1) != 1:
        return "elements of a row of 'out' that do not lie side by side"
    compiled = first is None or first.dtype is FP4 or compiles(first.dtype, first.device)
    return compiled if isinstance(compiled, str) else ""


def supports_scaled(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    x13_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    block_size: int = 0,
    out: Tensor | None = None,
) -> bool | str:
    """Check the weights' type, blocks only for fp8, and rows that fit into a program."""
    if w13.dtype not in (torch.int8, FP8) or w2.dtype is not w13.dtype:
        return "weights of int8 or float8_e4m3fn, both of one type"
    if any(
        scale is not None and scale.dtype is not torch.float32 for scale in (w13_scale, w2_scale, x13_scale, x2_scale)
    ):
        return "scales of float32"
    if not block_size and max(w13.shape[2], w2.shape[2]) > WIDEST:
        return f"more than {WIDEST} elements with one scale"
    refused = refused_blocks(block_size, w13.dtype)
    return refused or _refused(hidden_states, activation, out, w13, w2, w13_bias, w2_bias) or True


def supports_packed(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    out: Tensor | None,
) -> bool | str:
    """Check that the weights' type is known and compiles."""
    if w13.dtype not in (torch.uint8, torch.int8, FP4, FP8) or w2.dtype is not w13.dtype:
        return "weights of uint8, int8, float4_e2m1fn_x2 or float8_e4m3fn, both of one type"
    return _refused(hidden_states, activation, out, w13, w2, w13_bias, w2_bias) or True


def _of_pairs(values: Tensor | None, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor | None:
    """Return the value of each pair's expert; arbitrary for pairs without an expert on this rank."""
    if values is None:
        return None
    chosen = topk_ids.flatten().long().clamp(min=0)
    return values[chosen if expert_map is None else expert_map[chosen].long().clamp(min=0)]


def scaled_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    x13_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    block_size: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantized_moe.scaled_moe`."""
    tokens, hidden = hidden_states.shape
    out = result(hidden_states, (tokens, hidden), out)
    if not out.numel():
        return out
    experts, inner = w2.shape[0], w2.shape[2]
    if not experts:
        return out.zero_()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    topk, integers = topk_ids.shape[1], w13.dtype is torch.int8
    kind = "int8" if integers else "float8_e4m3fn"
    numbered = experts if expert_map is None else expert_map.shape[0]
    wide = hidden_states.dtype is torch.float32
    narrow = sums_narrow(hidden_states.dtype, power_of_two(tokens) * topk, numbered, block_size)
    block_plans = BLOCK_PLANS if narrow else EXACT_BLOCK_PLANS
    plan = (block_plans if block_size else SCALED_PLANS).choose(tokens, topk, numbered)
    order = arrange(topk_ids, expert_map, numbered, plan.rows)

    def product(
        rows: tuple[Tensor, Tensor],
        weight: tuple[Tensor, Tensor, Tensor | None],
        tile: Tile,
        activated: tuple[str, bool],
        weighted: bool,
        exact: bool,
        to: Tensor,
    ) -> None:
        numbers, scale, bias = weight
        (_, columns, depth), at_once = numbers.shape, min(tile.depth, block_size or tile.depth)
        stages = stages_that_fit(to.device, (plan.rows + tile.columns) * at_once, tile.stages)
        tensors = (*rows, numbers, scale.contiguous(), numbers if bias is None else bias, topk_weights, *order.tensors)
        multiply(
            _launch_scaled,
            (*tensors, to),
            (
                *strides(numbers, bias), pairs // len(rows[0]), depth, columns, scale.shape[1], scale.shape[2],
                block_size, *activated, bias is not None, weighted, integers, exact, min(SHORT_SUM, at_once), stages,
            ),
            columns,
            tile._replace(depth=at_once),
            stages,
            order,
        )  # fmt: skip

    pairs = order.pairs
    x, repeat = hidden_states, topk if x13_scale is not None else 1
    if apply_router_weight_on_input:
        x, repeat = (x[:, None].float() * topk_weights[:, :, None].float()).view(pairs, hidden), 1
    gated = activation in GATED_ACTIVATIONS
    between = hidden_states.new_empty((pairs, inner), dtype=torch.float32)
    outputs = hidden_states.new_empty((pairs, hidden))
    rows = quantized_rows(x, kind, block_size or hidden, _of_pairs(x13_scale, topk_ids, expert_map), repeat)
    first, second = (w13, w13_scale, w13_bias), (w2, w2_scale, w2_bias)
    product(rows, first, plan.up, (activation.removesuffix("_no_mul"), gated), False, not narrow, between)
    rows = quantized_rows(between, kind, block_size or inner, _of_pairs(x2_scale, topk_ids, expert_map))
    product(rows, second, plan.down, ("", False), not apply_router_weight_on_input, wide, outputs)
    add_up(outputs.view(tokens, topk, hidden), out, topk_ids, expert_map)
    return out


def weight_only_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
    out: Tensor | None = None,
    x13_factor: Tensor | None = None,
    x2_factor: Tensor | None = None,
    rounding: str = "",
) -> Tensor:
    """See :data:`fl_dispatch.ops.quantized_moe.weight_only_moe`. For half types weights are rounded to them.

    PyTorch's operators round rows; integers and scales stay apart until the product, because a half type cannot hold
    their product.
    """
    tokens, hidden = hidden_states.shape
    out = result(hidden_states, (tokens, hidden), out)
    if not out.numel():
        return out
    experts, (packed, float4, w13), (*_, w2) = w2.shape[0], stored_numbers(w13), stored_numbers(w2)
    if not experts:
        return out.zero_()
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    topk, wide = topk_ids.shape[1], hidden_states.dtype is torch.float32
    numbered = experts if expert_map is None else expert_map.shape[0]
    plan = (WIDE_PACKED_PLANS if wide else PACKED_PLANS).choose(tokens, topk, numbered)
    order = arrange(topk_ids, expert_map, numbered, plan.rows)

    def product(
        rows: tuple[Tensor, Tensor | None],
        weight: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        tile: Tile,
        activated: tuple[str, bool],
        weighted: bool,
        first: bool,
        shared: int,
        to: Tensor,
    ) -> None:
        (x, x_scale), (numbers, scale, zero, bias) = rows, weight
        _, columns, stored = numbers.shape
        scale, groups = scale.contiguous(), scale.shape[2]
        zeros, added = scale if zero is None else zero.contiguous(), numbers if bias is None else bias
        of_rows = (x.stride(0), *strides(numbers, bias), first, shared, x_scale is not None)
        unit = min(tile.depth, divisor(stored * packed // groups))
        late = unit >= LEAST_DEPTH
        tile = tile._replace(depth=unit if late else LEAST_DEPTH)
        stage = tile.depth * (tile.columns // packed + plan.rows * x.element_size())
        multiply(
            _launch_packed,
            (x, x if x_scale is None else x_scale, numbers, scale, zeros, added, topk_weights, *order.tensors, to),
            (
                *of_rows, stored, columns, groups, zero is not None, packed, float4, unit, *activated,
                bias is not None, weighted, late,
            ),
            columns,
            tile,
            stages_that_fit(x.device, stage, tile.stages),
            order,
        )  # fmt: skip

    def changed(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Round the rows of a product; return them with their scales."""
        if rounding == "int8":
            integers, scale = int8_rows(x)
            return integers.to(hidden_states.dtype), scale
        return rounded(x, rounding, factor).to(hidden_states.dtype) if rounding else x, None

    inner, gated, on_input = w2.shape[2] * packed, activation in GATED_ACTIVATIONS, apply_router_weight_on_input
    activated, x, shared = (activation.removesuffix("_no_mul"), gated), hidden_states, topk
    if rounding and on_input:
        x, shared = (x[:, None].float() * topk_weights[:, :, None].float()).view(order.pairs, hidden), 1
    elif x13_factor is not None:
        x, shared = x.repeat_interleave(topk, 0), 1
    between = hidden_states.new_empty((order.places, inner), dtype=torch.float32 if rounding else None)
    outputs = hidden_states.new_empty((order.pairs, hidden))
    rows, first = changed(x, _of_pairs(x13_factor, topk_ids, expert_map)), (w13, w13_scale, w13_zero, w13_bias)
    product(rows, first, plan.up, activated, on_input and not rounding, True, shared, between)
    if x2_factor is not None:
        *_, expert_ids, _ = order.tensors
        sorted_pairs = order.options[0]
        x2_factor = (
            x2_factor[expert_ids.clamp(min=0)].repeat_interleave(plan.rows)
            if sorted_pairs
            else _of_pairs(x2_factor, topk_ids, expert_map)
        )
    second = (w2, w2_scale, w2_zero, w2_bias)
    product(changed(between, x2_factor), second, plan.down, ("", False), not on_input, False, 1, outputs)
    add_up(outputs.view(tokens, topk, hidden), out, topk_ids, expert_map)
    return out
