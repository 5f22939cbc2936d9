"""The kernels of each decoding step in C++, for tensors in main memory.

In main memory the launches of a form's ten or twenty small operations cost more than their work. The PyTorch forms run
without a C++ compiler (see :mod:`fl_dispatch.cpp`), and for arguments that the functions do not take: integers of
another type, tensors with gaps, drafts, requests with a temperature.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
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
"""A function's answer that it did its work."""
OUTSIDE = 1
"""A function's answer that a row or a token is outside its table."""
NATIVE: dict[Form, Callable[[Any], bool]] = {}
"""Form → the function that replaces it, which gets the kernel's arguments as attributes."""


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
    function, otherwise = NATIVE[form], launch.launched(form, names)

    def run(*args: Any, **kwargs: Any) -> None:
        if not function(SimpleNamespace(**launch.named(names, args, kwargs))):
            otherwise(*args, **kwargs)

    return run


def _in_place_of(form: Form) -> Callable[[Callable[[Any], bool]], Callable[[Any], bool]]:
    """Register a function for a form, which runs if the function answers ``False``."""

    def register(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
        NATIVE[form] = function
        return function

    return register


Sized = tuple[Tensor | None, int]
"""A tensor of integers, or ``None``, and the number of elements that a function reads or writes."""


def _run(name: str, tensors: Sequence[Sized], *rest: int) -> bool:
    """Call a function.

    Args:
        name: the function.
        tensors: ``None`` becomes the address 0.
        rest: its other arguments.

    Returns:
        Whether the function did its work; if it does not take the arguments, ``False``, and nothing is written.

    Raises:
        IndexError: a row or a token is outside its table.
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
    """Return the addresses of tensors that a function may write; ``None`` if one is not in main memory."""
    try:
        return memory.addresses(tensors)
    except NotSupported:
        return None


def _tables(addresses: Tensor, strides: Tensor) -> tuple[ctypes.Array[ctypes.c_int64], int] | None:
    """Return the addresses of the tables in a tensor of addresses, and their smallest number of rows.

    Args:
        addresses: ``[groups]``, with the tables attached (:func:`.tables.remember`).
        strides: ``[groups]``, which must equal the tables' widths.

    Returns:
        ``None`` unless every table has 32-bit block numbers without gaps.
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
def _prepare_pos_seq_lens(a: Any) -> bool:
    requests = a.idx_mapping.numel()
    tensors = (
        (a.pos, 0),
        (a.seq_lens, max(requests, a.max_num_reqs)),
        (a.idx_mapping, 0),
        (a.query_start_loc, requests + 1),
        (a.num_computed_tokens, 0),
    )
    sizes = requests, a.max_num_reqs, a.pos.numel(), a.num_computed_tokens.numel()
    return _run("prepare_pos_seq_lens", tensors, *sizes)


@_in_place_of(batch.combine_sampled_and_draft_tokens)
def _combine_sampled_and_draft_tokens(a: Any) -> bool:
    requests, states, drafts = a.idx_mapping.numel(), a.prefill_len.numel(), a.draft_tokens.shape[1]
    tensors = (
        (a.input_ids, 0),
        (a.idx_mapping, 0),
        (a.last_sampled_tokens, states),
        (a.query_start_loc, requests + 1),
        (a.seq_lens, requests),
        (a.prefill_len, 0),
        (a.draft_tokens, states * drafts),
        (a.cu_num_logits, requests + 1),
        (a.logits_indices, 0),
    )
    sizes, sampled = (requests, a.input_ids.numel(), states, a.logits_indices.numel()), a.NUM_NEW_SAMPLED_TOKENS
    return _run("combine_sampled_and_draft_tokens", tensors, drafts, max(0, sampled), *sizes)


@_in_place_of(batch.get_num_sampled_and_rejected)
def _get_num_sampled_and_rejected(a: Any) -> bool:
    requests = a.idx_mapping.numel()
    tensors = (
        *((each, requests) for each in (a.num_sampled, a.num_rejected, a.seq_lens)),
        (a.cu_num_logits, requests + 1),
        (a.idx_mapping, 0),
        (a.prefill_len, 0),
    )
    return _run("get_num_sampled_and_rejected", tensors, requests, a.prefill_len.numel())


@_in_place_of(batch.post_update)
def _post_update(a: Any) -> bool:
    if getattr(a, "draft_tokens", None) is not None:
        return False
    requests, states = a.idx_mapping.numel(), a.total_len.numel()
    sampled, row = a.sampled_tokens.shape[1], a.all_token_ids.shape[1]
    counted = 0 if a.output_bin_counts is None else a.output_bin_counts.shape[1]
    tensors = (
        (a.idx_mapping, 0),
        (a.num_computed_tokens, states),
        (a.last_sampled_tokens, states),
        (a.sampled_tokens, requests * sampled),
        (a.num_sampled, requests),
        (a.num_rejected, requests),
        (a.all_token_ids, states * row),
        (a.total_len, 0),
        (a.query_start_loc, requests + 1),
        (a.output_bin_counts, states * counted),
    )
    return _run("post_update", tensors, counted, sampled, row, requests, states)


@_in_place_of(tables.gather_block_tables)
def _gather_block_tables(a: Any) -> bool:
    pointers = a.src_block_table_ptrs, a.dst_block_table_ptrs
    sources, targets = (_tables(each, a.block_table_strides) for each in pointers)
    if sources is None or targets is None or a.num_blocks.dim() != 2:
        return False
    groups, states = a.num_blocks.shape
    if groups != len(sources[0]) or sources[1] < states:
        return False
    tensors = [(a.batch_idx_to_req_idx, a.num_reqs), (a.block_table_strides, groups), (a.num_blocks, 0)]
    if masked := getattr(a, "MASK_SLIDING_WINDOW", False):
        sizes = (a.num_computed_tokens, states), (a.sliding_window_reach, groups), (a.block_sizes, groups)
        if any(tensor is None for tensor, _ in sizes):
            return False
        tensors += sizes
    else:  # vLLM passes any tensor
        tensors += [(None, 0)] * 3
    tables_ = ctypes.addressof(sources[0]), ctypes.addressof(targets[0])
    return _run("gather_block_tables", tensors, *tables_, masked, a.num_reqs, states, groups, targets[1])


@_in_place_of(tables.compute_slot_mappings)
def _compute_slot_mappings(a: Any) -> bool:
    enabled, stride = a.slot_mapping_enabled, a.slot_mappings_stride
    found = _tables(a.block_table_ptrs, a.block_table_strides)
    flags = _addresses(enabled)
    if a.CP_SIZE != 1 or found is None or flags is None:
        return False
    if enabled.dtype is not torch.bool or not enabled.is_contiguous():
        return False
    requests, groups = a.idx_mapping.numel(), len(found[0])
    tensors = (
        (a.idx_mapping, 0),
        (a.query_start_loc, requests + 1),
        (a.pos, 0),
        (a.block_table_strides, groups),
        (a.block_sizes, groups),
        (a.slot_mappings, (groups - 1) * stride + a.max_num_tokens),
    )
    if enabled.numel() < groups or stride < 0 or flags[0] is None:
        return False
    return _run(
        "compute_slot_mappings",
        tensors,
        ctypes.addressof(found[0]),
        flags[0],
        stride,
        a.PAD_ID,
        requests,
        found[1],
        groups,
        min(a.pos.numel(), a.max_num_tokens),
        a.max_num_tokens,
    )


@_in_place_of(sampling.gumbel_sample)
def _gumbel_sample(a: Any) -> bool:
    floats = a.logits, a.local_max, a.temp
    if a.logits_cache is not None or any(tensor.dtype is not torch.float32 for tensor in floats) or a.logits.dim() != 2:
        return False
    rows, blocks = a.expanded_idx_mapping.numel(), -(-a.vocab_size // a.BLOCK_SIZE)
    if a.logits.stride(1) != 1 or not 1 <= a.vocab_size <= a.logits.shape[1] or a.logits.shape[0] != rows:
        return False
    if not a.local_max.shape == a.local_argmax.shape == (rows, blocks):
        return False
    if not (a.local_max.is_contiguous() and a.temp.is_contiguous()) or (found := _addresses(*floats)) is None:
        return False
    return _run(
        "gumbel_sample",
        ((a.local_argmax, 0), (a.expanded_idx_mapping, 0)),
        *(address or 0 for address in found),
        a.logits.stride(0),
        rows,
        a.temp.numel(),
        a.vocab_size,
        a.BLOCK_SIZE,
        blocks,
    )
