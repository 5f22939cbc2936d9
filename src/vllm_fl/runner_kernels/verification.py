"""PyTorch forms of the kernels that accept or reject drafts (Leviathan et al., arXiv 2211.17192).

Rows of logits are ordered by request: one per draft, then one for the token after the last draft. A draft is in
``draft_sampled`` one row after the logits that judge it; a negative one is never accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import rows_of
from .sampling import WORD, best_of_blocks, divisor, in_blocks, noised

NEVER = float("-inf")
ROUNDS = 10
PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
SCALE = 4.6566127342e-10
"""The step of Triton's random numbers in [0, 1)."""
LEAST = 4.6566127342e-10
"""The smallest random number that the kernel takes."""


def gather_draft_sampled(
    draft_sampled: Tensor,
    pos: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    prefill_len: Tensor,
    num_logits: int,
) -> None:
    """Write the token and position of each row of logits; -1 for drafts of a request that still reads its prompt."""
    index = logits_indices[:num_logits].to(torch.int64)
    place, local = positions[index], expanded_local_pos[:num_logits]
    prompt = prefill_len[expanded_idx_mapping[:num_logits].to(torch.int64)]
    in_prompt = (local > 0) & (place - local < prompt)
    draft_sampled.copy_(input_ids[index].masked_fill(in_prompt, -1))
    pos.copy_(place)


def flatten_sampled(flat_sampled: Tensor, sampled: Tensor, num_sampled: Tensor, cu_num_logits: Tensor) -> None:
    """Write each request's tokens to its rows of logits."""
    rows = rows_of(cu_num_logits, len(num_sampled), len(flat_sampled))
    written = rows.inside & (rows.offset < num_sampled[rows.request])
    tokens = sampled[rows.request, rows.offset.clamp(max=sampled.shape[1] - 1)]
    flat_sampled.copy_(torch.where(written, tokens.to(flat_sampled.dtype), flat_sampled))


def local_logits_stats(
    target_local_argmax: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write per row and block of the vocabulary the largest logit, its token, and the sum of exponentials below it."""
    state = expanded_idx_mapping.to(torch.int64)
    values = target_logits[:, :vocab_size].float()
    best_of_blocks(values, target_local_argmax, target_local_max, BLOCK_SIZE)
    target_local_sumexp.copy_(_sums(values, target_local_max, BLOCK_SIZE))
    if draft_logits is not None:
        temperature = temp[state].float()
        step = expanded_local_pos.to(torch.int64).clamp(max=draft_logits.shape[1] - 1)
        drafts = draft_logits[state, step, :vocab_size].float() / divisor(temperature)[:, None]
        draft_local_max.copy_(in_blocks(drafts, draft_local_max.shape[1], BLOCK_SIZE).amax(-1))
        draft_local_sumexp.copy_(_sums(drafts, draft_local_max, BLOCK_SIZE))


def _sums(values: Tensor, maximum: Tensor, block: int) -> Tensor:
    found = (in_blocks(values, maximum.shape[1], block) - maximum[..., None]).exp().sum(-1)
    return torch.where(maximum > NEVER, found, 0.0)


def rejection(
    sampled: Tensor,
    rejected_steps: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_rejected_logsumexp: Tensor,
    target_logits: Tensor,
    target_local_argmax: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_sampled: Tensor,
    draft_logits: Tensor | None,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    synthetic_conditional_rates: Tensor | None,
    USE_BLOCK_VERIFICATION: bool = False,
    FLY_WINDOW_SIZE: int = 0,
) -> None:
    """Count the drafts of each request that are accepted, and write its tokens up to the first that is not.

    A greedy request's first rejected draft is replaced by the target's token. Other requests' tokens are drawn later,
    from the written sums of exponentials at the last judged draft.

    Raises:
        NotImplementedError: for a method other than the standard one, which the configuration refuses at start.
    """
    if USE_BLOCK_VERIFICATION or FLY_WINDOW_SIZE:
        raise NotImplementedError("vllm_fl verifies drafts one by one")
    requests, steps = len(cu_num_logits) - 1, sampled.shape[1] - 1
    state = idx_mapping[:requests].to(torch.int64)
    start = cu_num_logits[:requests].to(torch.int64)
    step = torch.arange(steps, device=sampled.device)
    there = step < (cu_num_logits[1:].to(torch.int64) - start - 1)[:, None]
    row = (start[:, None] + step).clamp(max=len(target_logits) - 1)
    draft = draft_sampled[(row + 1).clamp(max=len(draft_sampled) - 1)].to(torch.int64)
    valid, draft = there & (draft >= 0), draft.clamp(min=0)
    temperature = temp[state].float()[:, None]
    uniform = uniform_float(seed[state][:, None].to(torch.int64), pos[row].to(torch.int64))
    block = target_local_max.nan_to_num(nan=NEVER, posinf=float("inf"), neginf=NEVER).argmax(-1)
    best = target_local_argmax.gather(1, block[:, None])[:, 0][row]
    target_lse, draft_lse = _logsumexp(target_local_max, target_local_sumexp)[row], torch.zeros_like(uniform)
    target_logprob = target_logits[row, draft].float() - target_lse
    draft_logprob = torch.zeros_like(uniform)
    if draft_logits is not None:
        draft_lse = _logsumexp(draft_local_max, draft_local_sumexp)[row]
        logit = draft_logits[state[:, None], step, draft].float() / divisor(temperature)
        draft_logprob = logit - draft_lse
    if synthetic_conditional_rates is not None:
        accepted = uniform < synthetic_conditional_rates[:steps]
    else:
        accepted = torch.where(temperature == 0, best == draft, target_logprob > uniform.log() + draft_logprob)
    accepted &= valid
    length = accepted.to(torch.int64).cumprod(1).sum(1)
    judged = there & (step <= length[:, None]) & ((temperature == 0) | valid)
    token = torch.where((temperature == 0) & ~accepted, best, draft)
    sampled[:, :steps] = torch.where(judged, token, sampled[:, :steps])
    rejected_steps.copy_(length)
    last = (judged.sum(1) - 1)[:, None]
    random = (last >= 0) & (temperature != 0)
    for rejected, sums in ((target_rejected_logsumexp, target_lse), (draft_rejected_logsumexp, draft_lse)):
        rejected.copy_(torch.where(random, sums.gather(1, last.clamp(min=0)), 0.0)[:, 0])


def _logsumexp(maximum: Tensor, sums: Tensor) -> Tensor:
    """Return the value of each row, from the maxima and the sums of its blocks."""
    largest = maximum.amax(-1, keepdim=True)
    return (largest + (sums * (maximum - largest).exp()).sum(-1, keepdim=True).log())[:, 0]


def resample(
    resampled_local_argmax: Tensor,
    resampled_local_max: Tensor,
    target_logits: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_logits: Tensor | None,
    draft_rejected_logsumexp: Tensor,
    rejected_step: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    draft_sampled: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    watermarking: Tensor | None,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Draw each request's token after its accepted drafts: the largest of each block of the vocabulary.

    After a rejected draft the distribution is the excess of the target's over the draft's.

    Raises:
        NotImplementedError: watermarks, which the configuration refuses at start.
    """
    if watermarking is not None:
        raise NotImplementedError("vllm_fl has no watermarks without Triton")
    length = rejected_step.to(torch.int64)
    row = cu_num_logits[:-1].to(torch.int64) + length
    state = expanded_idx_mapping[row].to(torch.int64)
    temperature = temp[state.clamp(min=0)].float().masked_fill(state < 0, 0.0)
    rejected = draft_sampled[(row + 1).clamp(max=len(draft_sampled) - 1)].to(torch.int64)
    some = (row < cu_num_logits[1:] - 1) & (rejected >= 0)
    values = target_logits[row, :vocab_size].float()
    if draft_logits is None:
        left = values.scatter(1, rejected.clamp(0, vocab_size - 1)[:, None], NEVER)
    else:
        target = values - target_rejected_logsumexp[:, None]
        step = length.clamp(max=draft_logits.shape[1] - 1)
        drafts = draft_logits[state.clamp(min=0), step, :vocab_size].float()
        drafts = drafts / divisor(temperature)[:, None]
        ratio = (drafts - draft_rejected_logsumexp[:, None] - target).exp()
        left = torch.where(ratio < 1.0, target + torch.log1p(-ratio), NEVER)
    values = torch.where(some[:, None], left, values).to(resampled_local_max.dtype)
    seed, place = seed[state.clamp(min=0)].masked_fill(state < 0, 0), pos[row].to(torch.int64)
    values = noised(values, temperature, seed, place, temp)
    best_of_blocks(values, resampled_local_argmax, resampled_local_max, BLOCK_SIZE)


def insert_resampled(
    sampled: Tensor,
    num_sampled: Tensor,
    resampled_local_argmax: Tensor,
    resampled_local_max: Tensor,
    resample_num_blocks: int,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    temp: Tensor,
) -> None:
    """Append the drawn token of each request and count it; a greedy one keeps its token if a draft was replaced."""
    length = num_sampled.to(torch.int64)
    row = cu_num_logits[:-1].to(torch.int64) + length
    temperature = temp[expanded_idx_mapping[row].to(torch.int64)].float()
    drawn = (temperature != 0) | (row == cu_num_logits[1:] - 1)
    largest = resampled_local_max[:, :resample_num_blocks]
    best = largest.nan_to_num(nan=NEVER, posinf=float("inf"), neginf=NEVER).argmax(-1)
    token = resampled_local_argmax.gather(1, best[:, None])
    kept = sampled.gather(1, length[:, None])
    sampled.scatter_(1, length[:, None], torch.where(drawn[:, None], token, kept))
    num_sampled += 1


def uniform_float(seeds: Tensor, offsets: Tensor) -> Tensor:
    """Return Triton's ``tl.rand`` of int64 seeds and offsets, at least :data:`LEAST` (Salmon et al., 2011)."""
    seeds, offsets = torch.broadcast_tensors(seeds, offsets)
    counter = [offsets & WORD, (offsets >> 32) & WORD, torch.zeros_like(offsets), torch.zeros_like(offsets)]
    keys = [seeds & WORD, (seeds >> 32) & WORD]
    for _ in range(ROUNDS):
        first, second = (factor * counter[index] for factor, index in zip(PHILOX_FACTORS, (0, 2), strict=True))
        counter = [
            ((second >> 32) & WORD) ^ counter[1] ^ keys[0],
            second & WORD,
            ((first >> 32) & WORD) ^ counter[3] ^ keys[1],
            first & WORD,
        ]
        keys = [(key + step) & WORD for key, step in zip(keys, PHILOX_KEYS, strict=True)]
    signed = torch.where(counter[0] >= 1 << 31, counter[0] - (1 << 32), counter[0])
    return (torch.where(signed < 0, -signed - 1, signed).float() * SCALE).clamp(min=LEAST)
