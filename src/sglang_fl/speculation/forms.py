"""Kernels of SGLang's speculation in plain PyTorch.

Each function has the parameters of SGLang's function that would launch a kernel. Drafts of a request are the columns of
a table ``[requests, width]``; its first column is the certain token. ``retrieve_next_token`` has the first column that
continues a column, or -1. ``retrieve_next_sibling`` has the next column that continues the same column, or -1.

Only :func:`write_slots` waits for the device, because its requests write different numbers of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..bridge.drafted_states import parents

DRAFTS_ONLY = 1
"""SGLang's ``TreeMaskMode.QLEN_ONLY``: the mask has no columns for tokens that a request already has."""


# -- trees ------------------------------------------------------------------------------------------------------------


def build_tree(
    parents: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    width: int,
    tree_mask_mode: int,
) -> None:
    """Describe the drafts of a step; overwrite the fourth to the eighth argument.

    Args:
        parents: ``[requests, nodes]``; the proposal that each group of ``topk`` proposals continues, except the first.
        top_scores_index: ``[requests, width - 1]``; the proposals to verify, in order.
        seq_lens: ``[requests]``; the tokens in the cache.
        tree_mask: bool ``[requests * width * width]``; the drafts that a draft sees: itself and those that it
            continues.
        positions: ``[requests * width]``.
    """
    if tree_mask_mode != DRAFTS_ONLY:
        raise NotImplementedError(f"sglang_fl checks no drafts with masks of kind {tree_mask_mode}")
    columns = torch.arange(width, device=seq_lens.device)
    continued = torch.zeros(len(seq_lens), width - 1, dtype=torch.long, device=seq_lens.device)
    if parents.shape[1] > 0:  # otherwise all drafts follow the certain token
        group = top_scores_index // topk
        proposal = parents.gather(1, group.clamp(max=parents.shape[1] - 1))
        found = (top_scores_index[:, None] == proposal[..., None]).long().argmax(2) + 1
        continued = torch.where(group > 0, found, 0)
    parent = torch.nn.functional.pad(continued, (1, 0), value=-1)
    follows = parent[..., None] == columns  # [requests, draft, the one before it]
    sees = torch.eye(width, dtype=torch.bool, device=seq_lens.device).expand_as(follows)
    for _ in range(spec_steps):
        sees = sees | (sees.float() @ follows.float()).bool()
    younger = follows.transpose(1, 2)  # [requests, draft, one that follows it]
    sibling = (parent[..., None] == parent[:, None]) & (columns > columns[:, None])
    tree_mask.view(-1, width, width).copy_(sees)
    positions.view(-1, width).copy_(seq_lens[:, None] + sees.sum(2) - 1)
    retrieve_index.copy_(_places(len(seq_lens), columns))
    retrieve_next_token.copy_(_first(younger))
    retrieve_next_sibling.copy_(_first(sibling))


def _first(marked: Tensor) -> Tensor:
    """Return the first marked column of each row, or -1."""
    return torch.where(marked.any(-1), marked.long().argmax(-1), -1)


def _places(requests: int, columns: Tensor) -> Tensor:
    """Return ``[requests, width]``: numbers of all drafts of a step, request by request."""
    return columns + len(columns) * torch.arange(requests, device=columns.device)[:, None]


def read_chain(
    tree_mask: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    requests: int,
    width: int,
) -> None:
    """Describe drafts with a given mask: the chain from the first column on; the rest is padding.

    Args:
        tree_mask: ``[requests * width * width]``; whether a draft sees another one.
    """
    columns = torch.arange(width, device=seq_lens.device)
    chain = columns <= columns[:, None]
    in_chain = (tree_mask.view(requests, width, width).bool() == chain).all(2).cumprod(1).bool()
    followed = torch.nn.functional.pad(in_chain[:, 1:], (0, 1))
    positions.view(requests, width).copy_(seq_lens[:, None] + columns)
    retrieve_index.view(requests, width).copy_(_places(requests, columns))
    retrieve_next_token.view(requests, width).copy_(torch.where(followed, columns + 1, -1))
    retrieve_next_sibling.fill_(-1)


# -- which drafts are accepted ----------------------------------------------------------------------------------------


def _accept(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    path: Tensor,
    number: Tensor,
    last: Tensor,
) -> None:
    """Write each request's new tokens: the drafts of a path, and the token after them.

    Args:
        predicts: ``[requests * width]``; the token after each column of the path.
        accept_index: ``[requests, longest path]``; the indices of these columns in ``predicts``.
        accept_token_num: ``[requests]``; becomes ``number``.
        path: ``[requests, longest path]``; ``number + 1`` columns, then the last one repeated.
        last: ``[requests]``.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    ended, tokens = steps >= number[:, None], candidates.gather(1, path)
    after = torch.where(ended, last[:, None].to(tokens.dtype), tokens.roll(-1, 1))
    places = retrieve_index.gather(1, path)
    accept_token_num.copy_(number)
    accept_index.copy_(torch.where(steps <= number[:, None], places, accept_index))
    predicts[places.flatten().long()] = after.flatten().to(predicts.dtype)


def _walk(parent: Tensor, longest: int, choose: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the certain token to following drafts, as long as one is chosen.

    Args:
        parent: see :func:`~sglang_fl.bridge.drafted_states.parents`.
        longest: columns of a path.
        choose: a column of each request, and the columns after it → the accepted ones among these.

    Returns:
        The paths ``[requests, longest]``, their numbers of drafts, and their last columns.
    """
    here = torch.zeros(len(parent), dtype=torch.long, device=parent.device)
    path, number, going = [here], here.clone(), torch.ones_like(here, dtype=torch.bool)
    for _ in range(longest - 1):
        following = parent == here[:, None]
        found = _first(following & choose(here, following))
        going = going & (found >= 0)
        here = torch.where(going, found, here)
        number = number + going
        path.append(here)
    return torch.stack(path, 1), number, here


def verify_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the drafts that are the target's best tokens ``[requests, width]``; see :func:`_accept`."""

    def best(here: Tensor, following: Tensor) -> Tensor:
        return candidates == target_predict.gather(1, here[:, None])

    parent = parents(retrieve_next_token, retrieve_next_sibling)
    path, number, end = _walk(parent, accept_index.shape[1], best)
    last = target_predict.gather(1, end[:, None]).squeeze(1)
    _accept(predicts, accept_index, accept_token_num, candidates, retrieve_index, path, number, last)
    return predicts, accept_index, accept_token_num


def _draw(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw a token of each row of ``weights`` ``[requests, vocabulary]``, by numbers in [0, 1)."""
    sums = weights.cumsum(1)
    drawn = (sums <= coins[:, None] * sums[:, -1:]).sum(1)
    possible = (weights > 0).cumsum(1).argmax(1)  # the last token with a weight
    return torch.minimum(drawn, possible)


def _row(table: Tensor, number: Tensor) -> Tensor:
    """Return ``table[request, number[request]]``, ``[requests, vocabulary]``; the last row if there is no such row."""
    place = number.clamp(max=table.shape[1] - 1)[:, None, None]
    return table.gather(1, place.expand(-1, 1, table.shape[2])).squeeze(1)


def sample_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a draft by its probability under the target; a rejected one is replaced by another token.

    With both thresholds at 1 the tokens have the target's distribution.

    Args:
        candidates: ``[requests, width]``.
        uniform_samples: ``[requests, width]`` in [0, 1); each judges the drafts after a column.
        uniform_samples_for_final_sampling: ``[requests]``; draws the last token.
        target_probs: ``[requests, width, vocabulary]`` float32.
        threshold_single: a draft with at least this probability is always accepted.
        threshold_acc: probabilities are divided by it.
    """
    tokens = candidates.long()

    def chances(here: Tensor, following: Tensor) -> Tensor:
        """Return each column's token probability after ``here``; 0 for columns that do not follow it."""
        return torch.where(following, _row(target_probs, here).gather(1, tokens), 0.0)

    def lucky(here: Tensor, following: Tensor) -> Tensor:
        own, coin = chances(here, following), uniform_samples.gather(1, here[:, None])
        together = own.cumsum(1) / max(threshold_acc, 1e-9)  # a sibling is considered when those before it are rejected
        return (own > 0) & ((coin < together) | (own >= threshold_single))

    parent = parents(retrive_next_token, retrive_next_sibling)
    path, number, end = _walk(parent, accept_index.shape[1], lucky)
    rejected = (parent == end[:, None]) & (number < accept_index.shape[1] - 1)[:, None]
    left = _row(target_probs, end)
    lost = torch.zeros_like(left).scatter_add(1, tokens, rejected.to(left.dtype))
    last = _draw(left.masked_fill(lost > 0, 0.0), uniform_samples_for_final_sampling)
    _accept(predicts, accept_index, accept_token_num, candidates, retrive_index, path, number, last)


def sample_by_rejection(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Accept a draft with probability ``min(1, target / draft)`` (Leviathan et al., arXiv 2211.17192).

    Args:
        draft_probs: ``[requests, width - 1, vocabulary]``; the distribution from which the drafts were drawn.
    """
    if block_verification:
        raise NotImplementedError("sglang_fl does not support --speculative-use-block-verification yet")
    drafts = candidates[:, 1:].long()[..., None]
    target = target_probs[:, :-1].gather(2, drafts).squeeze(2)
    draft = draft_probs.gather(2, drafts).squeeze(2)
    number = ((draft > 0) & (draft <= 1) & (uniform_samples[:, :-1] * draft < target)).cumprod(1).sum(1)
    drafted = _row(draft_probs, number)
    drafted = torch.where((drafted >= 0) & (drafted <= 1), drafted, 0.0)
    whole = (number == drafts.shape[1])[:, None]
    left = _row(target_probs, number) - drafted.masked_fill(whole, 0.0)
    last = _draw(left.clamp(min=0), uniform_samples_for_final_sampling)
    path = torch.arange(accept_index.shape[1], device=number.device).minimum(number[:, None])
    _accept(predicts, accept_index, accept_token_num, candidates, retrive_index, path, number, last)


def best(x: Tensor) -> Tensor:
    """Return the best token of each row ``[rows]`` int64."""
    return x.argmax(-1)


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Return normalized probabilities ``[rows, vocabulary]`` of each row's ``top_ks`` best tokens, 0 for others."""
    ordered = probs.sort(1, descending=True).values
    least = ordered.gather(1, (top_ks.long().clamp(1, probs.shape[1]) - 1)[:, None])
    return _share(probs, probs >= least)


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Return shares of the best tokens that together have at least ``top_ps``."""
    ordered = probs.sort(1, descending=True).values
    kept = ordered.cumsum(1) - ordered <= top_ps[:, None]
    least = ordered.gather(1, kept.sum(1, keepdim=True).clamp(min=1) - 1)
    return _share(probs, probs >= least)


def _share(probs: Tensor, kept: Tensor) -> Tensor:
    left = probs.masked_fill(~kept, 0.0)
    return left / left.sum(1, keepdim=True)


# -- slots of the cache -----------------------------------------------------------------------------------------------


def _window(req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, width: int) -> Tensor:
    """Return slots ``[requests, width]`` of the tokens from ``starts`` on."""
    columns = starts.long()[:, None] + torch.arange(width, device=starts.device)
    return req_to_token[req_pool_indices.long()[:, None], columns]


def slots_of_drafts(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Write the slots of each request's ``topk * num_cols`` tokens after its last one into ``out_cache_loc``.

    Args:
        positions: ``[requests * topk]``, or ``None``; becomes the position of the first of them.
        mrope: ``[3, requests * topk]``, or ``None``; the same.
    """
    out_cache_loc.copy_(_window(req_to_token, req_pool_indices, seq_lens, topk * num_cols).flatten())
    first = seq_lens.repeat_interleave(topk)
    for place in (positions, mrope):
        if place is not None:
            place.copy_(first.expand_as(place))


def slots_of_window(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, draft_token_num: int, **_: Any
) -> Tensor:
    """Return slots ``[requests * draft_token_num]`` int64 of each request's tokens from ``start_offset`` on."""
    return _window(req_to_token, req_pool_indices, start_offset, draft_token_num).flatten().long()


def write_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    requests: int,
) -> None:
    """Write slots into ``req_to_token``: those of each request's tokens from ``start_offset`` to ``end_offset``."""
    lengths = (end_offset - start_offset).long()
    owners = torch.repeat_interleave(lengths)
    columns = torch.arange(len(owners), device=owners.device) - (lengths.cumsum(0) - lengths - start_offset)[owners]
    slots = out_cache_loc[: len(owners)].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[owners], columns] = slots


def last_accepted(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, requests: int
) -> None:
    """Write the last new token of each request into ``bonus_tokens`` ``[requests]``."""
    table = accept_tokens.view(requests, accept_stride)
    bonus_tokens.copy_(table.gather(1, accept_lens.long()[:, None] - 1).squeeze(1))
