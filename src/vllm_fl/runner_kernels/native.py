"""The kernels of each decoding step in C++, for tensors in main memory.

There the launches of a form's ten or twenty small operations cost more than their work. The forms run without a C++
compiler (see :mod:`fl_dispatch.cpp`), and for arguments that the functions do not take: integers of another type,
tensors with gaps, drafts, requests with a temperature.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import cpp
from fl_dispatch import native as memory
from fl_dispatch.errors import NotSupported
from fl_dispatch.logger_manager import get_logger

from . import batch, launch, sampling, tables
from .launch import Form

logger = get_logger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
DONE = 0
"""A function's answer: it did its work."""
OUTSIDE = 1
"""A function's answer: it found a row or a token outside of its table."""
NATIVE: dict[Form, Form] = {}
"""Form → the function in its place."""


@cache
def compiles() -> bool:
    """Whether the functions can be compiled; if not, the log says why."""
    if why := cpp.why_not(SOURCE):
        logger.info("the model runner's kernels run in PyTorch forms, because %s", why)
    return not why


def launched(form: Form, names: Sequence[str]) -> Form:
    """Wrap a form as :func:`.launch.launched` does, with the function in its place if there is one."""
    if form not in NATIVE or not compiles():
        return launch.launched(form, names)
    function, otherwise = launch.launched(NATIVE[form], names), launch.launched(form, names)

    def run(*args: Any, **kwargs: Any) -> None:
        if not function(*args, **kwargs):
            otherwise(*args, **kwargs)

    return run


def _in_place_of(form: Form) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Register a function for a form, which runs where the function answers ``False``."""

    def register(function: Callable[..., bool]) -> Callable[..., bool]:
        NATIVE[form] = function
        return function

    return register


Sized = tuple[Tensor | None, int]
"""A tensor of integers, or none, and how many elements a function reads or writes."""


def _run(name: str, tensors: tuple[Sized, ...], *rest: int) -> bool:
    """Call a function.

    Args:
        name: the function.
        tensors: ``None`` becomes the address 0.
        rest: its other arguments.

    Returns:
        Whether it did its work. ``False``, and nothing is written, if it does not take the arguments.

    Raises:
        IndexError: a row or a token lies outside of its table.
    """
    wide = 0
    for place, (tensor, least) in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.dtype is torch.int64:
            wide |= 1 << place
        elif tensor.dtype is not torch.int32:
            return False
        if tensor.numel() < least or not tensor.is_contiguous():
            return False
    found = _addresses(*(tensor for tensor, _ in tensors))
    if found is None:
        return False
    answer = _function(name, 1 + len(found) + len(rest))(wide, *(address or 0 for address in found), *rest)
    if answer == OUTSIDE:
        raise IndexError(f"{name}: a request's row or a token lies outside of its table")
    return answer == DONE


def _addresses(*tensors: Tensor | None) -> list[int | None] | None:
    """The addresses of tensors, as a function may write any; ``None`` if one is not in main memory."""
    try:
        return memory.addresses(tensors)
    except NotSupported:
        return None


def _tables(addresses: Tensor, strides: Tensor) -> tuple[ctypes.Array[ctypes.c_int64], int] | None:
    """The addresses of the tables behind a tensor of addresses, and the least number of their rows.

    Args:
        addresses: ``[groups]``; it knows the tables (:func:`.tables.remember`).
        strides: ``[groups]``, which must be the tables' widths.

    Returns:
        ``None`` unless every table is one of block numbers in 32 bits without gaps.
    """
    known: tuple[Tensor, ...] = getattr(addresses, tables.TENSORS, ())
    if not known or any(
        table.dtype is not torch.int32 or table.dim() != 2 or not table.is_contiguous() for table in known
    ):
        return None
    found = _addresses(*known)
    if found is None or _addresses(strides) is None or strides.tolist() != [table.shape[1] for table in known]:
        return None
    return (ctypes.c_int64 * len(found))(*(address or 0 for address in found)), min(table.shape[0] for table in known)


@cache
def _function(name: str, arguments: int) -> Callable[..., int]:
    function: Any = getattr(cpp.load(SOURCE), name)
    function.argtypes, function.restype = [ctypes.c_int64] * arguments, ctypes.c_int64
    made: Callable[..., int] = function
    return made


@_in_place_of(batch.prepare_pos_seq_lens)
def _prepare_pos_seq_lens(
    pos: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
) -> bool:
    requests = idx_mapping.numel()
    tensors = (
        (pos, 0),
        (seq_lens, max(requests, max_num_reqs)),
        (idx_mapping, 0),
        (query_start_loc, requests + 1),
        (num_computed_tokens, 0),
    )
    sizes = requests, max_num_reqs, pos.numel(), num_computed_tokens.numel()
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
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> bool:
    requests, states, drafts = idx_mapping.numel(), prefill_len.numel(), draft_tokens.shape[1]
    tensors = (
        (input_ids, 0),
        (idx_mapping, 0),
        (last_sampled_tokens, states),
        (query_start_loc, requests + 1),
        (seq_lens, requests),
        (prefill_len, 0),
        (draft_tokens, states * drafts),
        (cu_num_logits, requests + 1),
        (logits_indices, 0),
    )
    sizes = requests, input_ids.numel(), states, logits_indices.numel()
    return _run("combine_sampled_and_draft_tokens", tensors, drafts, max(0, NUM_NEW_SAMPLED_TOKENS), *sizes)


@_in_place_of(batch.get_num_sampled_and_rejected)
def _get_num_sampled_and_rejected(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
) -> bool:
    requests = idx_mapping.numel()
    tensors = (
        *((each, requests) for each in (num_sampled, num_rejected, seq_lens)),
        (cu_num_logits, requests + 1),
        (idx_mapping, 0),
        (prefill_len, 0),
    )
    return _run("get_num_sampled_and_rejected", tensors, requests, prefill_len.numel())


@_in_place_of(batch.post_update)
def _post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,
) -> bool:
    if draft_tokens is not None:
        return False
    requests, states = idx_mapping.numel(), total_len.numel()
    sampled, row = sampled_tokens.shape[1], all_token_ids.shape[1]
    counted = 0 if output_bin_counts is None else output_bin_counts.shape[1]
    tensors = (
        (idx_mapping, 0),
        (num_computed_tokens, states),
        (last_sampled_tokens, states),
        (sampled_tokens, requests * sampled),
        (num_sampled, requests),
        (num_rejected, requests),
        (all_token_ids, states * row),
        (total_len, 0),
        (query_start_loc, requests + 1),
        (output_bin_counts, states * counted),
    )
    return _run("post_update", tensors, counted, sampled, row, requests, states)


@_in_place_of(tables.gather_block_tables)
def _gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks: Tensor,
    num_reqs: int,
    num_computed_tokens: Tensor | None = None,
    sliding_window_reach: Tensor | None = None,
    block_sizes: Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> bool:
    sources, targets = (_tables(each, block_table_strides) for each in (src_block_table_ptrs, dst_block_table_ptrs))
    if sources is None or targets is None or num_blocks.dim() != 2:
        return False
    groups, states = num_blocks.shape
    if groups != len(sources[0]) or sources[1] < states:
        return False
    masked = num_computed_tokens, sliding_window_reach, block_sizes
    if MASK_SLIDING_WINDOW and any(each is None for each in masked):
        return False
    sizes = (states, groups, groups) if MASK_SLIDING_WINDOW else (0, 0, 0)  # else vLLM hands any tensor over
    tables_of = (batch_idx_to_req_idx, num_reqs), (block_table_strides, groups), (num_blocks, 0)
    tensors = (*tables_of, *zip(masked, sizes, strict=True))
    tables_ = ctypes.addressof(sources[0]), ctypes.addressof(targets[0])
    return _run("gather_block_tables", tensors, *tables_, MASK_SLIDING_WINDOW, num_reqs, states, groups, targets[1])


@_in_place_of(tables.compute_slot_mappings)
def _compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    slot_mappings: Tensor,
    slot_mappings_stride: int,
    CP_SIZE: int,
    PAD_ID: int,
) -> bool:
    enabled, found = slot_mapping_enabled, _tables(block_table_ptrs, block_table_strides)
    flags = _addresses(enabled)
    if CP_SIZE != 1 or found is None or flags is None or enabled.dtype is not torch.bool or not enabled.is_contiguous():
        return False
    requests, groups = idx_mapping.numel(), len(found[0])
    tensors = (
        (idx_mapping, 0),
        (query_start_loc, requests + 1),
        (pos, 0),
        (block_table_strides, groups),
        (block_sizes, groups),
        (slot_mappings, (groups - 1) * slot_mappings_stride + max_num_tokens),
    )
    if enabled.numel() < groups or slot_mappings_stride < 0 or flags[0] is None:
        return False
    return _run(
        "compute_slot_mappings",
        tensors,
        ctypes.addressof(found[0]),
        flags[0],
        slot_mappings_stride,
        PAD_ID,
        requests,
        found[1],
        groups,
        min(pos.numel(), max_num_tokens),
        max_num_tokens,
    )


@_in_place_of(sampling.gumbel_sample)
def _gumbel_sample(
    local_argmax: Tensor,
    local_max: Tensor,
    logits_cache: Tensor | None,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    seeds: Tensor,
    pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> bool:
    floats = logits, local_max, temp
    if logits_cache is not None or any(tensor.dtype is not torch.float32 for tensor in floats) or logits.dim() != 2:
        return False
    rows, blocks = expanded_idx_mapping.numel(), -(-vocab_size // BLOCK_SIZE)
    if logits.stride(1) != 1 or not 1 <= vocab_size <= logits.shape[1] or logits.shape[0] != rows:
        return False
    if not local_max.shape == local_argmax.shape == (rows, blocks):
        return False
    if not (local_max.is_contiguous() and temp.is_contiguous()) or (found := _addresses(*floats)) is None:
        return False
    return _run(
        "gumbel_sample",
        ((local_argmax, 0), (expanded_idx_mapping, 0)),
        *(address or 0 for address in found),
        logits.stride(0),
        rows,
        temp.numel(),
        vocab_size,
        BLOCK_SIZE,
        blocks,
    )
