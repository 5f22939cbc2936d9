"""The kernels of each decoding step in C++, for tensors in main memory.

There a form's ten or twenty small operations cost more than what they do. Without a C++ compiler the forms run (see
:mod:`fl_dispatch.cpp`). So they do for whatever the functions do not take: integers of another type, tensors with gaps,
drafts, requests with a temperature.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import cpp
from fl_dispatch.logger_manager import get_logger

from . import batch, sampling, tables

logger = get_logger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
DONE, OUTSIDE = 0, 1
"""Answers of a function: it did its work; it found a row or a token outside of its table."""
Form = Callable[..., None]
NATIVE: dict[Form, Form] = {}
"""Form → the function in its place."""


@cache
def compiles() -> bool:
    """Whether the functions can be compiled; if not, the log says why."""
    if why := cpp.why_not(SOURCE):
        logger.info("the model runner's kernels run in PyTorch forms, because %s", why)
    return not why


def forms(others: Mapping[str, Form]) -> dict[str, Form]:
    """The forms, with the functions in their place where there are some.

    Args:
        others: kernel → its form.
    """
    return {name: NATIVE.get(form, form) for name, form in others.items()} if compiles() else dict(others)


def _in_place_of(form: Form) -> Callable[[Callable[..., bool]], Form]:
    """Register a function for a form, which runs where the function answers ``False``."""

    def register(function: Callable[..., bool]) -> Form:
        @wraps(form)
        def run(*args: Any, **kwargs: Any) -> None:
            if not function(*args, **kwargs):
                form(*args, **kwargs)

        NATIVE[form] = run
        return run

    return register


def _run(name: str, tensors: tuple[Tensor | None, ...], *rest: int) -> bool:
    """Call a function.

    Args:
        name: the function.
        tensors: of integers; ``None`` becomes the address 0.
        rest: its other arguments.

    Returns:
        Whether it did its work. ``False``, and nothing is written, if it does not take the arguments.

    Raises:
        IndexError: a row or a token lies outside of its table.
    """
    wide, addresses = 0, []
    for place, tensor in enumerate(tensors):
        if tensor is None:
            addresses.append(0)
            continue
        if tensor.dtype is torch.int64:
            wide |= 1 << place
        elif tensor.dtype is not torch.int32:
            return False
        if not tensor.is_contiguous():
            return False
        addresses.append(tensor.data_ptr())
    answer = _function(name, 1 + len(addresses) + len(rest))(wide, *addresses, *rest)
    if answer == OUTSIDE:
        raise IndexError(f"{name}: a request's row or a token lies outside of its table")
    return answer == DONE


@cache
def _function(name: str, arguments: int) -> Callable[..., int]:
    function: Any = getattr(cpp.load(SOURCE), name)
    function.argtypes, function.restype = [ctypes.c_int64] * arguments, ctypes.c_int64
    made: Callable[..., int] = function
    return made


@_in_place_of(batch.prepare_pos_seq_lens)
def _prepare_pos_seq_lens(
    positions: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
    **_: Any,
) -> bool:
    tensors = positions, seq_lens, idx_mapping, query_start_loc, num_computed_tokens
    sizes = len(idx_mapping), max_num_reqs, len(positions), len(num_computed_tokens)
    return _run("prepare_pos_seq_lens", tensors, *sizes)


@_in_place_of(batch.combine_sampled_and_draft_tokens)
def _combine_sampled_and_draft_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    draft_tokens_stride: int,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    *,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: Any,
) -> bool:
    tensors = input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, prefill_len, draft_tokens
    sizes = len(idx_mapping), len(input_ids), len(prefill_len), len(logits_indices)
    return _run(
        "combine_sampled_and_draft_tokens",
        (*tensors, cu_num_logits, logits_indices),
        draft_tokens.shape[1],
        NUM_NEW_SAMPLED_TOKENS,
        *sizes,
    )


@_in_place_of(batch.get_num_sampled_and_rejected)
def _get_num_sampled_and_rejected(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
    **_: Any,
) -> bool:
    tensors = num_sampled, num_rejected, seq_lens, cu_num_logits, idx_mapping, prefill_len
    return _run("get_num_sampled_and_rejected", tensors, len(idx_mapping), len(prefill_len))


@_in_place_of(batch.post_update)
def _post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: Tensor,
    sampled_tokens_stride: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> bool:
    if draft_tokens is not None:
        return False
    tensors = idx_mapping, num_computed_tokens, last_sampled_tokens, sampled_tokens, num_sampled, num_rejected
    strides = 0 if output_bin_counts is None else output_bin_counts.shape[1], sampled_tokens.shape[1]
    return _run(
        "post_update",
        (*tensors, all_token_ids, total_len, query_start_loc, output_bin_counts),
        *strides,
        all_token_ids.shape[1],
        len(idx_mapping),
        len(total_len),
    )


@_in_place_of(tables.gather_block_tables)
def _gather_block_tables(
    idx_mapping: Tensor,
    source_addresses: Tensor,
    target_addresses: Tensor,
    strides: Tensor,
    num_blocks: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens: Tensor | None = None,
    sliding_window_reach: Tensor | None = None,
    block_sizes: Tensor | None = None,
    *,
    MASK_SLIDING_WINDOW: bool = False,
    **_: Any,
) -> bool:
    groups, states = num_blocks.shape
    rows = len(getattr(target_addresses, tables.TENSORS)[0])
    return _run(
        "gather_block_tables",
        (idx_mapping, strides, num_blocks, num_computed_tokens, sliding_window_reach, block_sizes),
        source_addresses.data_ptr(),
        target_addresses.data_ptr(),
        MASK_SLIDING_WINDOW,
        num_reqs,
        states,
        groups,
        rows,
    )


@_in_place_of(tables.compute_slot_mappings)
def _compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    addresses: Tensor,
    strides: Tensor,
    block_sizes: Tensor,
    enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    *,
    CP_SIZE: int,
    PAD_ID: int,
    **_: Any,
) -> bool:
    if CP_SIZE != 1:
        return False
    return _run(
        "compute_slot_mappings",
        (idx_mapping, query_start_loc, positions, strides, block_sizes, slot_mappings),
        addresses.data_ptr(),
        enabled.data_ptr(),
        slot_mappings_stride,
        PAD_ID,
        len(idx_mapping),
        len(getattr(addresses, tables.TENSORS)[0]),
        len(strides),
        min(len(positions), max_num_tokens),
        max_num_tokens,
    )


@_in_place_of(sampling.gumbel_sample)
def _gumbel_sample(
    local_argmax: Tensor,
    local_argmax_stride: int,
    local_max: Tensor,
    local_max_stride: int,
    logits_cache: Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: Tensor | None,
    logits_cache_source: Tensor | None,
    logits_cache_source_stride: int,
    logits: Tensor,
    logits_stride: int,
    idx_mapping: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    size: int,
    *,
    BLOCK_SIZE: int,
    **_: Any,
) -> bool:
    floats = logits, local_max, temperatures
    if logits_cache is not None or any(tensor.dtype is not torch.float32 for tensor in floats) or logits.stride(1) != 1:
        return False
    if not len(logits) == len(local_max) == len(local_argmax) == len(idx_mapping):
        return False
    if not (local_max.is_contiguous() and temperatures.is_contiguous()):
        return False
    return _run(
        "gumbel_sample",
        (local_argmax, idx_mapping),
        *(tensor.data_ptr() for tensor in floats),
        logits_stride,
        len(idx_mapping),
        len(temperatures),
        size,
        BLOCK_SIZE,
        local_max.shape[1],
    )
