"""Emulated mixture of experts: gates, and rows on their way to the experts and back."""

from __future__ import annotations

import torch

from . import FLOAT, kernel, require, require_default, require_dtype, require_same_dtype


def _top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest of each row; the lower column first among equals."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :k]


@kernel("npu_moe_gating_top_k")
def gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, experts (int32) and all gates (float32). Source: op-plugin's page and its equivalent program.

    Softmax (norm_type 0) or sigmoid (1); the bias counts for the choice alone; the best groups by their maximum (mode
    0) or their two best (1); sigmoid weights are divided by their sum. Refused: renorm, a bias of another dtype, more
    than 2048 experts (in groups padded to 32), groups of two or fewer, k beyond the chosen groups.
    Assumed: without out_flag the gates are not written (NaN). Hash gates (tid2eid) are not emulated.
    """
    require_default(input_ids=input_ids, tid2eid=tid2eid)
    require_dtype("x", x, FLOAT)
    require(x.dim() == 2, f"x has {x.dim()} dimensions, not 2")
    experts = x.shape[1]
    require(renorm == 0, f"renorm={renorm}, not 0")
    require(norm_type in (0, 1), f"norm_type={norm_type}, not 0 or 1")
    require(group_select_mode in (0, 1), f"group_select_mode={group_select_mode}, not 0 or 1")
    require(group_count > 0 and experts % group_count == 0, f"{experts} experts in {group_count} groups")
    size = experts // group_count
    require(size > 2, f"groups of {size} experts; more than two are wanted")
    require(-(-size // 32) * 32 * group_count <= 2048, f"{experts} experts in {group_count} groups exceed 2048")
    require(1 <= k_group <= group_count, f"k_group={k_group} of {group_count} groups")
    require(1 <= k <= size * k_group, f"k={k} of {size * k_group} experts in the chosen groups")
    gates = x.float().softmax(-1) if norm_type == 0 else torch.sigmoid(x.float())
    choice = gates
    if bias is not None:
        require(bias.shape == (experts,), f"bias is {tuple(bias.shape)}, not [{experts}]")
        require_same_dtype(x=x, bias=bias)
        choice = gates + bias.float()
    if group_count > 1:
        grouped = choice.view(len(x), group_count, size)
        scores = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        closed = torch.ones(len(x), group_count, dtype=torch.bool).scatter_(1, _top(scores, k_group), False)
        choice = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
    chosen = _top(choice, k)
    weights = gates.gather(1, chosen)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    written = gates if out_flag else torch.full_like(gates, torch.nan)
    return (weights * routed_scaling_factor).to(x.dtype), chosen.to(torch.int32), written


@kernel("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the k largest, and row indices [rows, k] that count columns first. Source: op-plugin.

    Refused: other than two or three dimensions, k beyond the experts or 1024. Assumed: float32 inside, equal gates in
    the order of experts. ``finished`` is not emulated, because the results of a finished row are not documented.
    """
    require_default(finished=finished)
    require_dtype("x", x, FLOAT)
    require(x.dim() in (2, 3), f"x has {x.dim()} dimensions, not 2 or 3")
    require(0 < k <= min(1024, x.shape[-1]), f"k={k} of {x.shape[-1]} experts")
    gates = x.float().softmax(-1)
    chosen = _top(gates, k)
    rows = chosen[..., 0].numel()
    index = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(chosen.shape).contiguous()
    return gates.gather(-1, chosen).to(x.dtype), chosen.to(torch.int32), index


@kernel("npu_moe_init_routing_v2")
def init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows in the order of their experts, where each went, tokens of each expert (int64), scales.

    Source: op-plugin's page and its equivalent program, without dropping, not quantized or by token (quant_mode 1).
    Refused: expert_idx that is not int32, an expert that is not below expert_num, a range beyond it.
    Assumed: rows and indices that the page calls invalid or not initialized are NaN and -1; without the flag the
    tokens are not written (-1). Dropping and other quantizations are not emulated.
    """
    require_default(offset=offset, drop_pad_mode=drop_pad_mode, x_dtype=x_dtype)
    require_dtype("x", x, FLOAT)
    require(x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx), "x is [rows, H], expert_idx [rows, k]")
    require(expert_idx.dtype == torch.int32, f"expert_idx is {expert_idx.dtype}, not int32")
    require(expert_tokens_num_type in (0, 1, 2), f"expert_tokens_num_type={expert_tokens_num_type}, not 0, 1 or 2")
    require(quant_mode in (-1, 1), f"quant_mode={quant_mode} is not emulated; -1 and 1 are")
    require(row_idx_type in (0, 1), f"row_idx_type={row_idx_type}, not 0 or 1")
    require(active_num >= -1, f"active_num={active_num}, not at least -1")
    first, end = active_expert_range or (0, expert_num)
    require(0 <= first < end <= expert_num, f"experts {first} to {end} of {expert_num}")
    experts = expert_idx.flatten().long()
    require(bool(((experts >= 0) & (experts < expert_num)).all()), f"an expert is not below {expert_num}")
    k, total = expert_idx.shape[1], experts.numel()
    active = (experts >= first) & (experts < end)
    order = torch.where(active, experts, expert_num).argsort(stable=True)
    available = int(active.sum())
    order = order[:available]
    rows = torch.full((total,), -1, dtype=torch.int32)
    if row_idx_type == 1:
        rows[:available] = order.to(torch.int32)
    else:
        rows[order] = torch.arange(available, dtype=torch.int32)
    size = total if active_num in (-1, 0) else min(active_num, total)
    kept = order[:size]
    expanded = torch.full((size, x.shape[1]), torch.nan, dtype=x.dtype)
    expanded[: len(kept)] = x[kept // k]
    scales = torch.full((size,), torch.nan)
    if quant_mode == 1:
        wide = expanded.float()
        if scale is not None:
            require(scale.dtype == torch.float32, f"scale is {scale.dtype}, not float32")
            require(scale.shape in ((1, x.shape[1]), (end - first, x.shape[1])), "scale is [1, H] or [experts, H]")
            wide[: len(kept)] *= scale if len(scale) == 1 else scale[experts[kept] - first]
        scales = wide.abs().amax(-1) / 127
        expanded = torch.round(wide / scales[:, None]).nan_to_num(0).to(torch.int8)
    elif scale is not None:
        require(scale.dtype == torch.float32 and scale.shape == (len(x),), f"scale must be float32 [{len(x)}]")
        scales[: len(kept)] = scale[kept // k]
    counts = torch.bincount(experts[active] - first, minlength=end - first)
    if expert_tokens_num_type == 0:
        tokens = counts.cumsum(0)
    elif expert_tokens_num_type == 1:
        tokens = counts
    else:
        tokens = torch.zeros(expert_num, 2, dtype=torch.int64)
        used = counts.nonzero().flatten()
        tokens[: len(used)] = torch.stack((used + first, counts[used]), 1)
    return expanded, rows, tokens if expert_tokens_num_flag else torch.full_like(tokens, -1), scales


@kernel("npu_moe_token_permute")
def token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in the order of their experts, and where each went (int32). Source: the wheel's docstring.

    Refused: padded_mode, indices of other than one or two dimensions or not integers, a negative expert.
    Assumed: a stable order.
    """
    require_dtype("tokens", tokens, FLOAT)
    require(not padded_mode, "padded_mode=True")
    require(tokens.dim() == 2 and indices.dim() in (1, 2), "tokens must be 2-dimensional, indices 1 or 2")
    require(indices.dtype in (torch.int32, torch.int64), f"indices are {indices.dtype}, not int32 or int64")
    require(bool((indices >= 0).all()), "indices must not be negative")
    k = indices.shape[1] if indices.dim() == 2 else 1
    order = indices.flatten().argsort(stable=True)
    where = torch.empty(len(order), dtype=torch.int32)
    where[order] = torch.arange(len(order), dtype=torch.int32)
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens[kept // k], where


@kernel("npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    """The rows of a token, times their probabilities, added up. Source: the wheel's docstring.

    Refused: padded_mode, indices that are not int32, repeat or lie beyond the rows, more than 512 experts a token.
    Assumed: float32 inside, and any floating dtype of probs.
    """
    require_default(restore_shape=restore_shape)
    require_dtype("permuted_tokens", permuted_tokens, FLOAT)
    require(not padded_mode, "padded_mode=True")
    require(permuted_tokens.dim() == 2 and sorted_indices.dim() == 1, "permuted_tokens is [rows, H], indices [rows]")
    require(sorted_indices.dtype == torch.int32, f"sorted_indices is {sorted_indices.dtype}, not int32")
    where = sorted_indices.long()
    require(bool(((where >= 0) & (where < len(permuted_tokens))).all()), "sorted_indices name rows that are not there")
    require(len(where.unique()) == len(where), "sorted_indices must not repeat")
    k = 1
    if probs is not None:
        require_dtype("probs", probs, FLOAT)
        require(
            probs.dim() == 2 and probs.numel() == len(where), f"probs is {tuple(probs.shape)}, of {len(where)} rows"
        )
        k = probs.shape[1]
    require(k <= 512, f"{k} experts a token, above 512")
    rows = permuted_tokens[where].float().view(-1, k, permuted_tokens.shape[1])
    if probs is not None:
        rows = rows * probs.float()[..., None]
    return rows.sum(1).to(permuted_tokens.dtype)


@kernel("npu_moe_finalize_routing")
def finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """skip1 + skip2 + the sum over k of scales * (rows + bias). Source: op-plugin's page and its program.

    expanded_src_to_dst_row counts columns first in modes 0 and 1, rows first in 2 and 3; -1 adds no row in 1 and 3.
    Refused: mixed dtypes, indices that are not int32 or beyond the rows, skip2 without skip1, bias without experts.
    Assumed: float32 inside. Without scales there is one expert a token, as in the page's program.
    """
    require_dtype("expanded_permuted_rows", expanded_permuted_rows, FLOAT)
    require(drop_pad_mode in (0, 1, 2, 3), f"drop_pad_mode={drop_pad_mode}, not 0 to 3")
    for name, tensor in (("skip1", skip1), ("skip2", skip2), ("bias", bias), ("scales", scales)):
        same = tensor is None or tensor.dtype == expanded_permuted_rows.dtype
        require(same, f"{name} has not the rows' dtype {expanded_permuted_rows.dtype}")
    require(skip1 is not None or skip2 is None, "skip2 without skip1")
    require(expanded_src_to_dst_row.dtype == torch.int32, f"indices are {expanded_src_to_dst_row.dtype}, not int32")
    require(bias is None or export_for_source_row is not None, "bias needs the experts of each row")
    rows = expanded_permuted_rows.flatten(0, -2)
    dropping = drop_pad_mode in (1, 3)
    require(expanded_permuted_rows.dim() == (3 if dropping else 2), "rows are [rows, H], with dropping [E, C, H]")
    where = expanded_src_to_dst_row.long()
    least = -1 if dropping else 0
    require(
        bool(((where >= least) & (where < len(rows))).all()), "expanded_src_to_dst_row names rows that are not there"
    )
    experts = 1 if scales is None else scales.shape[1]
    tokens = len(where) // experts
    where = where.view(experts, tokens).t() if drop_pad_mode in (0, 1) else where.view(tokens, experts)
    values = torch.where((where >= 0)[..., None], rows.float()[where.clamp(min=0)], 0.0)
    if bias is not None:
        assert export_for_source_row is not None
        values = values + bias.float()[export_for_source_row.long()]
    if scales is not None:
        values = values * scales.float()[..., None]
    total = values.sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            total = total + skip.float()
    return total.to(expanded_permuted_rows.dtype)
