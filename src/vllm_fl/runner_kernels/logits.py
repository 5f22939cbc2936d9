"""PyTorch forms of the kernels that change logits before a token is chosen. Logits are ``[rows, vocabulary]``."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32
"""Bits in a word of a packed mask."""
NEVER = float("-inf")


def unpacked(words: Tensor, columns: int) -> Tensor:
    """Return the bits of ``[rows, words]`` as bool ``[rows, columns]``, the lowest bit of a word first."""
    bits = (words[..., None] >> torch.arange(BITS, device=words.device, dtype=words.dtype)) & 1
    return bits.flatten(-2)[..., :columns].bool()


def packed(bits: Tensor, words: int) -> Tensor:
    """Return bool ``[rows, columns]`` as int32 ``[rows, words]``, the reverse of :func:`unpacked`."""
    padded = torch.nn.functional.pad(bits, (0, words * BITS - bits.shape[1]))
    values = padded.unflatten(1, (words, BITS)).to(torch.int64) << torch.arange(BITS, device=bits.device)
    return values.sum(-1).to(torch.int32)


def temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, vocab_size: int) -> None:
    """Divide each row by its request's temperature; a temperature of 0 means the largest logit, and does not divide."""
    value = temperature[expanded_idx_mapping.to(torch.int64)].float()
    divisor = torch.where(value == 0, 1.0, value)[:, None]
    logits[:, :vocab_size] = (logits[:, :vocab_size].float() / divisor).to(logits.dtype)


def min_p(logits: Tensor, expanded_idx_mapping: Tensor, min_p: Tensor, vocab_size: int) -> None:
    """Mask tokens with a probability below a share of the largest."""
    rows = logits[:, :vocab_size]
    bound = rows.amax(-1).float() + min_p[expanded_idx_mapping.to(torch.int64)].float().log()
    rows.masked_fill_(rows < bound[:, None], NEVER)


def bias(
    logits: Tensor,
    vocab_size: int,
    expanded_idx_mapping: Tensor,
    num_allowed_token_ids: Tensor,
    allowed_token_ids: Tensor,
    num_logit_bias: Tensor,
    bias_token_ids: Tensor,
    bias: Tensor,
    pos: Tensor,
    min_lens: Tensor,
    num_stop_token_ids: Tensor,
    restore_when_all_masked: Tensor,
    stop_token_ids: Tensor,
    CHECK_ALL_MASKED_ROWS: bool = False,
) -> None:
    """Keep only a request's allowed tokens, add its biases, and mask its stop tokens before its minimum length."""
    state, rows = expanded_idx_mapping.to(torch.int64), logits[:, :vocab_size]
    count = num_allowed_token_ids[state]
    rows.masked_fill_((count > 0)[:, None] & ~_named(allowed_token_ids[state], count, vocab_size), NEVER)
    count = num_logit_bias[state]
    tokens = bias_token_ids[state].to(torch.int64)
    valid = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    added = bias[state].to(logits.dtype).masked_fill(~valid, 0)
    rows.scatter_add_(1, tokens.masked_fill(~valid, 0), added)
    early = pos[: len(state)] + 1 < min_lens[state]
    ended = _named(stop_token_ids[state], num_stop_token_ids[state].masked_fill(~early, 0), vocab_size)
    if CHECK_ALL_MASKED_ROWS:
        nothing_left = (rows.masked_fill(ended, NEVER) == NEVER).all(-1) & restore_when_all_masked[state].bool()
        ended &= ~(nothing_left[:, None] & rows.isfinite())
    rows.masked_fill_(ended, NEVER)


def _named(tokens: Tensor, count: Tensor, size: int) -> Tensor:
    """Return bool ``[rows, size]``: the tokens among the first ``count`` of each row."""
    return _marked(tokens, torch.arange(tokens.shape[1], device=tokens.device) < count[:, None], size)


def _marked(tokens: Tensor, valid: Tensor, size: int) -> Tensor:
    """Return bool ``[rows, size]``: the valid tokens of each row; both arguments are ``[rows, any]``."""
    found = torch.zeros(len(tokens), size + 1, dtype=torch.bool, device=tokens.device)
    found.scatter_(1, tokens.to(torch.int64).masked_fill(~valid, size), True)
    return found[:, :size]


def penalties(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    token_ids: Tensor,
    expanded_local_pos: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
    prompt_bin_mask: Tensor,
    output_bin_counts: Tensor,
    vocab_size: int,
) -> None:
    """Penalize tokens of the prompt or the output, including drafts before a row."""
    state, rows = expanded_idx_mapping.to(torch.int64), logits[:, :vocab_size]
    counts = output_bin_counts[state][:, :vocab_size].to(torch.int64)
    place = torch.arange(len(state), device=state.device)
    before = place[:, None] - place
    drafted = (before >= 0) & (
        before < expanded_local_pos[: len(state), None]
    )  # rows of the same request up to this one
    tokens = token_ids[: len(state)].to(torch.int64).clamp(0, vocab_size - 1)
    counts.scatter_add_(1, tokens.expand(len(state), -1), drafted.to(torch.int64))
    seen = counts > 0
    factor = repetition_penalty[state].float()[:, None]
    scale = torch.where(unpacked(prompt_bin_mask[state], vocab_size) | seen, factor, 1.0)
    values = rows.float()
    values = values * torch.where(values > 0, 1.0 / scale, scale)
    values = values - frequency_penalty[state].float()[:, None] * counts
    rows.copy_(values - presence_penalty[state].float()[:, None] * seen)


def bincount(
    expanded_idx_mapping: Tensor,
    all_token_ids: Tensor,
    prompt_len: Tensor,
    prefill_len: Tensor,
    prompt_bin_mask: Tensor,
    output_bin_counts: Tensor,
) -> None:
    """Record the tokens in the prompts of new requests, and count tokens that were generated before."""
    state = expanded_idx_mapping.to(torch.int64)
    prompt, length = prompt_len[state][:, None], prefill_len[state][:, None]
    tokens = all_token_ids[state].to(torch.int64)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    words = prompt_bin_mask.shape[1]
    prompt_bin_mask[state] |= packed(_marked(tokens, place < prompt, words * BITS), words)
    generated = ((place >= prompt) & (place < length)).to(output_bin_counts.dtype)
    counts = output_bin_counts[state].scatter_add_(1, tokens.clamp(0, output_bin_counts.shape[1] - 1), generated)
    output_bin_counts[state] = counts


def bad_words(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    bad_word_token_ids: Tensor,
    bad_word_offsets: Tensor,
    num_bad_words: Tensor,
    all_token_ids: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
) -> None:
    """Mask the last token of each bad word if the output ends with its other tokens."""
    state, row = (
        expanded_idx_mapping.to(torch.int64),
        torch.arange(len(expanded_idx_mapping), device=expanded_idx_mapping.device)[:, None],
    )
    tokens, count = bad_word_token_ids[state].to(torch.int64), num_bad_words[state][:, None]
    word = torch.arange(bad_word_offsets.shape[1], device=tokens.device)
    offsets = (
        bad_word_offsets[state].to(torch.int64).masked_fill(word > count, tokens.shape[1])
    )  # tokens after these are stale
    begin, end = offsets[:, :-1], offsets[:, 1:]
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
    ends = offsets.gather(1, torch.searchsorted(offsets, place, right=True).clamp(max=offsets.shape[1] - 1))
    drafts = expanded_local_pos[: len(state), None].to(torch.int64)
    prompt = prompt_len[state][:, None].to(torch.int64)
    length = total_len[state][:, None].to(torch.int64) - prompt
    at = length + drafts - (ends - 1 - place)  # required place in the output of each token of a word except the last
    old = all_token_ids[state[:, None], (prompt + at).clamp(0, all_token_ids.shape[1] - 1)]
    drafted = input_ids[(row - drafts + at - length + 1).clamp(0, len(input_ids) - 1)]
    differs = (place < ends - 1) & ((at < 0) | (tokens != torch.where(at >= length, drafted, old)))
    wrong = torch.nn.functional.pad(differs.to(torch.int64).cumsum(1), (1, 0))
    fits = (word[:-1] < count) & (wrong.gather(1, end) == wrong.gather(1, begin))
    ruled_out = _marked(tokens.gather(1, (end - 1).clamp(min=0)), fits, logits.shape[1])
    logits.masked_fill_(ruled_out, NEVER)


def apply_grammar_bitmask(
    logits: Tensor, logits_indices: Tensor, cu_num_logits: Tensor, bitmask: Tensor, vocab_size: int, MASK_STRIDE: int
) -> None:
    """Mask the tokens that a grammar does not allow; a mask belongs to one row of a request."""
    request, place = logits_indices.to(torch.int64) // MASK_STRIDE, logits_indices.to(torch.int64) % MASK_STRIDE
    first, end = cu_num_logits[request].to(torch.int64), cu_num_logits[request + 1].to(torch.int64)
    row = torch.where(place < end - first, first + place, len(logits))
    ruled_out = torch.zeros(len(logits) + 1, vocab_size, dtype=torch.bool, device=logits.device)
    ruled_out[row] = ~unpacked(bitmask[: len(logits_indices)], vocab_size)
    logits[:, :vocab_size].masked_fill_(ruled_out[:-1], NEVER)


def num_nans(logits: Tensor, num_nans: Tensor, vocab_size: int) -> None:
    """Count the NaNs of each row."""
    num_nans[: len(logits)] = logits[:, :vocab_size].isnan().sum(-1).to(num_nans.dtype)
