"""PyTorch forms of the kernels that change logits before a token is chosen. Logits are ``[rows, vocabulary]``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BITS = 32
"""In a word of a packed mask."""
NEVER = float("-inf")


def unpacked(words: Tensor, columns: int) -> Tensor:
    """The bits of ``[rows, words]`` as bool ``[rows, columns]``, the lowest bit of a word first."""
    bits = (words[..., None] >> torch.arange(BITS, device=words.device, dtype=words.dtype)) & 1
    return bits.flatten(-2)[..., :columns].bool()


def packed(bits: Tensor, words: int) -> Tensor:
    """Bool ``[columns]`` as int32 ``[words]``, the reverse of :func:`unpacked`."""
    padded = bits.new_zeros(words * BITS)
    padded[: len(bits)] = bits
    values = padded.view(words, BITS).to(torch.int64) << torch.arange(BITS, device=bits.device)
    return values.sum(-1).to(torch.int32)


def temperature(logits: Tensor, stride: int, idx_mapping: Tensor, temperatures: Tensor, size: int, **_: Any) -> None:
    """Divide each row by its request's temperature; a temperature of 0 means the largest logit, and divides nothing."""
    value = temperatures[idx_mapping.to(torch.int64)].float()
    divisor = torch.where(value == 0, 1.0, value)[:, None]
    logits[:, :size] = (logits[:, :size].float() / divisor).to(logits.dtype)


def min_p(logits: Tensor, stride: int, idx_mapping: Tensor, shares: Tensor, size: int, **_: Any) -> None:
    """Rule out tokens with a probability below a share of the largest."""
    rows = logits[:, :size]
    bound = rows.amax(-1).float() + shares[idx_mapping.to(torch.int64)].float().log()
    rows.masked_fill_(rows < bound[:, None], NEVER)


def bias(
    logits: Tensor,
    stride: int,
    size: int,
    idx_mapping: Tensor,
    num_allowed: Tensor,
    allowed: Tensor,
    allowed_stride: int,
    num_biased: Tensor,
    biased: Tensor,
    biased_stride: int,
    biases: Tensor,
    biases_stride: int,
    positions: Tensor,
    min_lens: Tensor,
    num_stop: Tensor,
    restore_when_all_masked: Tensor,
    stop: Tensor,
    stop_stride: int,
    *,
    CHECK_ALL_MASKED_ROWS: bool = False,
    **_: Any,
) -> None:
    """Allow only a request's allowed tokens, add its biases, and rule its stop tokens out before its least length."""
    state, rows = idx_mapping.to(torch.int64), logits[:, :size]
    count = num_allowed[state]
    rows.masked_fill_((count > 0)[:, None] & ~_named(allowed[state], count, size), NEVER)
    count = num_biased[state]
    tokens = biased[state].to(torch.int64)
    valid = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    added = biases[state].to(logits.dtype).masked_fill(~valid, 0)
    rows.scatter_add_(1, tokens.masked_fill(~valid, 0), added)
    early = positions[: len(state)] + 1 < min_lens[state]
    ended = _named(stop[state], num_stop[state].masked_fill(~early, 0), size)
    if CHECK_ALL_MASKED_ROWS:
        nothing_left = (rows.masked_fill(ended, NEVER) == NEVER).all(-1) & restore_when_all_masked[state].bool()
        ended &= ~(nothing_left[:, None] & rows.isfinite())
    rows.masked_fill_(ended, NEVER)


def _named(tokens: Tensor, count: Tensor, size: int) -> Tensor:
    """Bool ``[rows, size]``: the tokens among the first ``count`` of each row."""
    valid = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    found = torch.zeros(len(tokens), size + 1, dtype=torch.bool, device=tokens.device)
    found.scatter_(1, tokens.to(torch.int64).masked_fill(~valid, size), True)
    return found[:, :size]


def penalties(
    logits: Tensor,
    stride: int,
    idx_mapping: Tensor,
    token_ids: Tensor,
    local_positions: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    prompt_mask: Tensor,
    prompt_mask_stride: int,
    output_counts: Tensor,
    output_counts_stride: int,
    size: int,
    **_: Any,
) -> None:
    """Penalize tokens that the prompt or the output has, drafts before a row included."""
    state, rows = idx_mapping.to(torch.int64), logits[:, :size]
    counts = output_counts[state][:, :size].to(torch.int64)
    place = local_positions[: len(state)].to(torch.int64)
    first = torch.arange(len(state), device=state.device) - place
    for earlier in range(int(place.max()) if len(place) else 0):
        column = (first + earlier + 1).clamp(max=len(token_ids) - 1)
        drafted = (earlier < place).to(torch.int64)[:, None]
        counts.scatter_add_(1, token_ids[column].to(torch.int64)[:, None].clamp(0, size - 1), drafted)
    seen = counts > 0
    factor = repetition[state].float()[:, None]
    scale = torch.where(unpacked(prompt_mask[state], size) | seen, factor, 1.0)
    values = rows.float()
    values = values * torch.where(values > 0, 1.0 / scale, scale)
    values = values - frequency[state].float()[:, None] * counts
    rows.copy_(values - presence[state].float()[:, None] * seen)


def bincount(
    idx_mapping: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prompt_len: Tensor,
    prefill_len: Tensor,
    prompt_mask: Tensor,
    prompt_mask_stride: int,
    output_counts: Tensor,
    output_counts_stride: int,
    **_: Any,
) -> None:
    """Note which tokens the prompts of new requests have, and count those that were generated before."""
    for state in idx_mapping.tolist():
        prompt, length = int(prompt_len[state]), int(prefill_len[state])
        tokens = all_token_ids[state, :length].to(torch.int64)
        found = torch.zeros(prompt_mask.shape[1] * BITS, dtype=torch.bool, device=prompt_mask.device)
        found[tokens[:prompt]] = True
        prompt_mask[state] |= packed(found, prompt_mask.shape[1])
        output_counts[state] += torch.bincount(tokens[prompt:], minlength=output_counts.shape[1]).to(
            output_counts.dtype
        )


def bad_words(
    logits: Tensor,
    stride: int,
    idx_mapping: Tensor,
    word_tokens: Tensor,
    word_tokens_stride: int,
    word_offsets: Tensor,
    word_offsets_stride: int,
    num_words: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prompt_len: Tensor,
    total_len: Tensor,
    input_ids: Tensor,
    local_positions: Tensor,
    **_: Any,
) -> None:
    """Rule out the last token of each bad word if the output ends with its other tokens."""
    for row, state in enumerate(idx_mapping.tolist()):
        if not (count := int(num_words[state])):
            continue
        place = int(local_positions[row])
        output = all_token_ids[state, int(prompt_len[state]) : int(total_len[state])].tolist()
        output += input_ids[row - place + 1 : row + 1].tolist()  # drafts before this row
        offsets, tokens = word_offsets[state].tolist(), word_tokens[state].tolist()
        for begin, end in pairwise(offsets[: count + 1]):
            *prefix, last = tokens[begin:end]
            if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
                logits[row, last] = NEVER


def apply_grammar_bitmask(
    logits: Tensor,
    stride: int,
    rows: Tensor,
    cu_num_logits: Tensor,
    bitmask: Tensor,
    bitmask_stride: int,
    size: int,
    *,
    MASK_STRIDE: int,
    **_: Any,
) -> None:
    """Rule out the tokens that a grammar does not allow; a mask belongs to a request and to one of its rows."""
    request, place = rows.to(torch.int64) // MASK_STRIDE, rows.to(torch.int64) % MASK_STRIDE
    first, end = cu_num_logits[request].to(torch.int64), cu_num_logits[request + 1].to(torch.int64)
    active = place < end - first
    row = (first + place)[active]
    allowed = unpacked(bitmask[: len(rows)][active], size)
    logits[row, :size] = logits[row, :size].masked_fill(~allowed, NEVER)


def num_nans(logits: Tensor, stride: int, found: Tensor, size: int, **_: Any) -> None:
    """Count the NaNs of each row."""
    found[: len(logits)] = logits[:, :size].isnan().sum(-1).to(found.dtype)
