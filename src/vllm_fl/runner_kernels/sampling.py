"""PyTorch form of the kernel that samples: the largest logit under Gumbel noise, from hashes of seed and position.

The noise is a function of seed, position and token alone (MurmurHash3's 32-bit mix, by Austin Appleby). So a request
draws the same tokens in any batch, by the Triton kernel and by this form, up to the last bits of a logarithm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from .rows import candidate_rows, flat, take

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
WORD = 0xFFFFFFFF
DRAFT_SALT = 1 << 30
"""Added to a draft's position, so that a draft and its verification draw different noise."""
SECOND_DOMAIN = 0x9E3779B9
NUMBERS = "fl_numbers"
"""Attribute of a device tensor: the host numbers of which it is a copy."""
LEAST = 5.960464477539063e-08
"""The smallest argument of a logarithm: half of float32's epsilon."""


def gumbel_sample(
    local_argmax: Tensor,
    local_max: Tensor,
    logits_cache: Tensor | None,
    logits_cache_col: Tensor | None,
    logits_cache_source: Tensor | None,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    seeds: Tensor,
    pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
) -> None:
    """Write for each row and block of the vocabulary the token with the largest noised logit, and that logit.

    Args:
        logits_cache: ``[states, columns, vocabulary]``, for drafts: ``logits_cache_source``, the logits before
            temperature, is written to the column ``logits_cache_col``, one for all rows or one each.
    """
    state = expanded_idx_mapping.to(torch.int64)
    real, state = state >= 0, state.clamp(min=0)
    seed = torch.where(real, take(seeds, state), 0)
    if logits_cache is not None:
        assert logits_cache_col is not None
        assert logits_cache_source is not None
        column = logits_cache_col.to(torch.int64).expand(len(state))
        row = torch.arange(len(state), device=state.device)
        row = torch.where(real, row, real.to(torch.int32).argmax())  # a row of no request writes the same as a real one
        cell = take(state, row), take(column, row), slice(vocab_size)
        logits_cache[cell] = torch.where(real.any(), logits_cache_source[row, :vocab_size], logits_cache[cell])
        if _mixes_columns():
            seed = seed ^ (column << 32)
    temperature = torch.where(real, take(temp, state).float(), 0.0)
    values = logits[:, :vocab_size].to(torch.float64 if USE_FP64 else torch.float32)
    if APPLY_TEMPERATURE:
        values = (logits[:, :vocab_size].float() / divisor(temperature)[:, None]).to(values.dtype)
    place = pos[: len(state)].to(torch.int64) + (DRAFT_SALT if IS_DRAFTING else 0)
    values = noised(values, temperature, seed, place, temp)
    best_of_blocks(values, local_argmax, local_max, BLOCK_SIZE)


def trace_replay(
    sampled: Tensor,
    idx_mapping: Tensor,
    trace_token_ids: Tensor,
    trace_len: Tensor,
    total_len: Tensor,
    prompt_len: Tensor,
) -> None:
    """Replace the tokens of requests that replay a trace, up to its end.

    Args:
        sampled: int64, ``[requests]``, or ``[requests, 1]``; overwritten.
        trace_token_ids: int32, ``[states, longest]``: the tokens after the prompt.
    """
    state = idx_mapping.to(torch.int64)
    real, state = state >= 0, state.clamp(min=0)
    step = (take(total_len, state) - take(prompt_len, state)).to(torch.int64)
    replayed = real & (step >= 0) & (step < take(trace_len, state))
    token = trace_token_ids[state, step.clamp(0, trace_token_ids.shape[1] - 1)]
    tokens = flat(sampled)[: len(state)]
    tokens.copy_(torch.where(replayed, token.to(tokens.dtype), tokens))


@cache
def _mixes_columns() -> bool:
    """Whether this vLLM mixes a draft's column into its seed."""
    return hasattr(importlib.import_module(GUMBEL), "spec_step_seed")


def remember(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the method that copies host numbers to the device, so that the copy keeps them."""

    @wraps(copy)
    def copied(self: Any, *args: Any) -> Tensor:
        made = copy(self, *args)
        setattr(made, NUMBERS, self.np)
        return made

    return copied


def divisor(temperature: Tensor) -> Tensor:
    """Return what to divide logits by: the temperature, or 1 where it is 0, because the largest logit counts there."""
    return torch.where(temperature == 0, 1.0, temperature)


def noised(values: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, all_temperatures: Tensor) -> Tensor:
    """Return logits ``[rows, vocabulary]`` with Gumbel noise in the rows with a temperature other than 0.

    Args:
        temperature: ``[rows]``, of the rows' requests.
        all_temperatures: ``[states]``; not read from the device if the host knows that all are 0.
    """
    numbers = getattr(all_temperatures, NUMBERS, None)
    if numbers is not None and not numbers.any():
        return values
    drawn = candidate_rows(temperature != 0)
    if not len(drawn):
        return values
    noise = gumbel_noise(seeds[drawn].to(torch.int64), positions[drawn], values.shape[1], values.dtype == torch.float64)
    return values.index_add(0, drawn, noise.masked_fill((temperature[drawn] == 0)[:, None], 0))


def best_of_blocks(values: Tensor, argmax: Tensor, maximum: Tensor, block: int) -> None:
    """Write each column block's largest value to ``maximum``, and the row's best column to all of ``argmax``.

    Both are ``[rows, blocks]``. The kernels write each block's own best column, and vLLM reads only the best block's.
    Only one block is searched for the place, because PyTorch on a CPU finds a maximum many times faster than its place.
    """
    columns = values.shape[1]
    whole = columns // block
    maximum[:, :whole] = values[:, : whole * block].unflatten(1, (whole, block)).amax(-1)
    if columns > whole * block:
        maximum[:, whole] = values[:, whole * block :].amax(-1)
    best = maximum.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).argmax(-1, keepdim=True)
    column = best * block + torch.arange(block, device=values.device)
    found = values.gather(1, column.clamp(max=columns - 1)).argmax(-1, keepdim=True)
    argmax.copy_(column.gather(1, found).expand_as(argmax))


def in_blocks(values: Tensor, blocks: int, block: int) -> Tensor:
    """Reshape ``[rows, columns]`` to ``[rows, blocks, block]``, with minus infinity after the last column."""
    return torch.nn.functional.pad(values, (0, blocks * block - values.shape[1]), value=float("-inf")).view(
        len(values), blocks, block
    )


def gumbel_noise(seeds: Tensor, positions: Tensor, size: int, float64: bool) -> Tensor:
    """Return Gumbel noise of each token ``[rows, size]``, from int64 ``seeds`` and ``positions`` of the rows."""
    low = _hash(seeds, positions, size, 0)
    if float64:
        random53 = ((_hash(seeds, positions, size, SECOND_DOMAIN) << 21) | (low >> 11)) & ((1 << 53) - 1)
        uniform = (random53.double() + 0.5) * 2.0**-53
        uniform = torch.where(uniform == 1.0, uniform - 2.0**-53, uniform)
        return -torch.log(-torch.log(uniform))
    uniform = (low >> 16).float() * 2.0**-16 + ((low & 0xFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-_log1p_of_negative(uniform))


def _log1p_of_negative(value: Tensor) -> Tensor:
    """Return ``log(1 - value)`` in ``[0, 1)``: a series of degree 8 below 1/4, as in the kernel."""
    polynomial = torch.full_like(value, 1 / 8)
    for degree in range(7, 0, -1):
        polynomial = 1 / degree + value * polynomial
    direct = torch.log((1.0 - value).clamp(min=LEAST))
    return torch.where(value < 0.25, -value * polynomial, direct)


def _hash(seeds: Tensor, positions: Tensor, size: int, domain: int) -> Tensor:
    """Return the 32-bit hash of seed, position and token, int64 ``[rows, size]``."""
    state = torch.full_like(seeds, domain)
    for key in (seeds & WORD, (seeds >> 32) & WORD, positions & WORD):
        state = _mixed(state, _key(key))
    mixed = _mixed(state[:, None], _token_keys(size, str(seeds.device)))
    mixed ^= 16
    mixed ^= mixed >> 16
    mixed = (mixed * 0x85EBCA6B) & WORD
    mixed ^= mixed >> 13
    mixed = (mixed * 0xC2B2AE35) & WORD
    return mixed ^ (mixed >> 16)


def _mixed(state: Tensor, key: Tensor) -> Tensor:
    return (_rotated(state ^ key, 13) * 5 + 0xE6546B64) & WORD


def _key(key: Tensor) -> Tensor:
    return (_rotated((key * 0xCC9E2D51) & WORD, 15) * 0x1B873593) & WORD


def _rotated(value: Tensor, by: int) -> Tensor:
    """Return 32-bit words, as int64 without a sign, rotated to the left."""
    return ((value << by) & WORD) | (value >> (32 - by))


@cache
def _token_keys(size: int, device: str) -> Tensor:
    """Return the part of the hash that depends only on the token, int64 ``[size]``."""
    return _key(torch.arange(size, device=device))
