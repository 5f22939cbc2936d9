"""Forms of the kernels that move states of requests between blocks, and clear blocks.

A request's state is in one block of vLLM's KV cache at a time. When the request outgrows the block, the state moves to
the next block, and the old one keeps a copy for the prefix cache. These kernels get only addresses, which their forms
read and write, so they are for main memory. On a device no form moves states, and blocks are cleared as tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

WORD = 4
"""Bytes of an entry of vLLM's block tables, and of the unit in which it counts memory to clear."""


def scatter_num_accepted(idx_mapping: Tensor, num_sampled: Tensor, num_accepted: Tensor) -> None:
    """Store the number of accepted tokens of each request, at least one."""
    _keep(idx_mapping, num_accepted, num_sampled[: len(idx_mapping)].clamp(min=1).to(num_accepted.dtype))


def fill_num_accepted(idx_mapping: Tensor, num_accepted: Tensor, num_sampled: int) -> None:
    """Set the number of accepted tokens of each request to ``num_sampled``."""
    _keep(idx_mapping, num_accepted, num_accepted.new_full(idx_mapping.shape, num_sampled))


def _keep(idx_mapping: Tensor, num_accepted: Tensor, numbers: Tensor) -> None:
    """Write the numbers of requests without waiting for the device; -1 is none and goes to a place after the last."""
    longer = torch.cat((num_accepted, num_accepted[:1]))
    longer[idx_mapping.long()] = numbers
    num_accepted.copy_(longer[:-1])


def zero_kv_blocks(seg_addrs: Tensor, seg_block_strides: Tensor, seg_page_sizes: Tensor, block_ids: Tensor) -> None:
    """Clear blocks of each layer's cache; strides and sizes count words."""
    numbers = block_ids.tolist()
    segments = (each.tolist() for each in (seg_addrs, seg_block_strides, seg_page_sizes))
    for address, stride, size in zip(*segments, strict=True):
        for block in numbers:
            ctypes.memset(address + WORD * block * stride, 0, WORD * size)


def clear_as_tensors(zeroer: Any) -> None:
    """Make vLLM's ``KVBlockZeroer`` clear blocks as tensors where no form can use an address. Idempotent."""
    if not hasattr(zeroer.__init__, "__wrapped__"):
        zeroer.__init__ = _with_caches(zeroer.__init__)
        zeroer.zero_block_ids = _zero_block_ids


def _with_caches(init: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's ``__init__``, followed by keeping the caches as views of blocks."""

    @wraps(init)
    def made(
        self: Any,
        device: torch.device,
        attn_groups_iter: Iterable[Any],
        kernel_block_sizes: list[int],
        static_forward_context: Mapping[str, Any],
        num_blocks: int,
        *rest: Any,
        **named: Any,
    ) -> None:
        groups = list(attn_groups_iter)
        init(self, device, groups, kernel_block_sizes, static_forward_context, num_blocks, *rest, **named)
        layers = (static_forward_context[name] for group in groups for name in group.layer_names)
        caches = (layer.kv_cache for layer in layers if isinstance(layer.kv_cache, Tensor))
        self.fl_caches = [cache.unflatten(0, (num_blocks, -1)) for cache in caches]

    return made


def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
    for cache in self.fl_caches if block_ids else ():
        cache[torch.tensor(block_ids, device=cache.device)] = 0


def batch_memcpy(sources: Tensor, targets: Tensor, sizes: Tensor, **_: Any) -> None:
    """Copy ``sizes`` bytes from each source address to its target; both ranges may overlap."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def preprocess_align(
    idx_mapping: Tensor,
    state_idx: Tensor,
    num_computed_tokens: Tensor,
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor,
    src_col: Tensor,
    src_off: Tensor,
    num_reqs: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Record the block of each request's state, and advance to the block in which the step ends."""
    request = idx_mapping[:num_reqs].long()
    before, accepted = state_idx[request], num_accepted_tokens[request]
    src_col[request], src_off[request] = before, (accepted - 1).clamp(min=0)
    end = num_computed_tokens[request] + query_start_loc[: num_reqs + 1].diff()
    after = (torch.div(end + MAMBA_BLOCK_SIZE - 1, MAMBA_BLOCK_SIZE, rounding_mode="floor") - 1).to(before.dtype)
    state_idx[request] = after
    num_accepted_tokens[request] = torch.where((before >= 0) & (before != after), 1, accepted)


@dataclass(frozen=True)
class _State:
    """One state of one layer, with the place of its blocks in bytes.

    Args:
        table: address of its group's block table.
        address, stride: address of its first block, and bytes from one to the next.
        size: bytes of a block that hold it; of one token's inputs for a convolution.
        window: number of tokens with inputs that a convolution keeps; 0 for other states.
        rows, row_stride: number of a convolution's channels if they lie apart, and bytes between them.
    """

    table: int
    address: int
    stride: int
    size: int
    window: int
    rows: int
    row_stride: int

    def move(self, row: int, source: int, target: int, ahead: int) -> None:
        """Copy the state of a request from one of its blocks to another.

        Args:
            row: bytes from the first request's row of the table to its own.
            source, target: columns of the table.
            ahead: accepted tokens after the first: a convolution's window moves by them, and other states have a block
                for each.
        """
        to = self._block(row, target)
        if not self.window:
            ctypes.memmove(to, self._block(row, source + ahead), self.size)
            return
        of, kept = self._block(row, source) + ahead * self.size, (self.window - ahead) * self.size
        for channel in range(self.rows or 1):
            ctypes.memmove(to + channel * self.row_stride, of + channel * self.row_stride, kept)

    def _block(self, row: int, column: int) -> int:
        number = ctypes.c_int32.from_address(self.table + row + WORD * column).value
        return self.address + number * self.stride


def _states(layout: Mapping[str, Tensor]) -> list[_State]:
    """Return the states of all layers, from the kernels' arguments."""
    columns = (
        layout["block_table_ptrs"][layout["state_group_indices"].long()],
        *(layout[f"state_{name}"] for name in ("base_addrs", "block_strides")),
        layout["state_elem_sizes"] * layout["state_inner_sizes"],
        *(layout[f"state_{name}"] for name in ("conv_widths", "dim_row_count", "dim_row_stride")),
    )
    return [_State(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]


def _requests(idx_mapping: Tensor | None, num_reqs: int) -> Iterator[int]:
    """Yield the state slot of each real request."""
    if idx_mapping is None:
        yield from range(num_reqs)
    else:
        yield from (request for request in idx_mapping[:num_reqs].tolist() if request >= 0)


def precopy_align(
    mamba_state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    block_table_stride_req: int,
    idx_mapping: Tensor | None,
    num_reqs: int,
    **layout: Tensor,
) -> None:
    """Copy the states of requests that continue in another block."""
    states = None
    for request in _requests(idx_mapping, num_reqs):
        source, target = int(src_col[request]), int(mamba_state_idx[request])
        if source < 0 or source == target:
            continue
        states = states or _states(layout)
        for state in states:
            state.move(WORD * request * block_table_stride_req, source, target, int(token_bias[request]))


def postprocess(
    num_accepted_tokens: Tensor,
    mamba_state_idx: Tensor,
    num_scheduled_tokens: Tensor | None,
    num_computed_tokens: Tensor,
    num_draft_tokens: Tensor | None,
    block_table_stride_req: int,
    num_accepted_tokens_out: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
    block_size: int,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    **layout: Tensor,
) -> None:
    """Copy the states of requests if their accepted tokens end a block that the step passed."""
    states = None
    for request in _requests(idx_mapping, num_reqs):
        accepted, source = int(num_accepted_tokens[request]), int(mamba_state_idx[request])
        computed = int(num_computed_tokens[request])
        if PRECOMPUTED_NEW_COMPUTED:
            running = computed - accepted + 1
        else:
            assert num_scheduled_tokens is not None
            assert num_draft_tokens is not None
            running = computed + int(num_scheduled_tokens[request]) - int(num_draft_tokens[request])
            computed = running + accepted - 1
        aligned = computed // block_size * block_size
        if aligned < running:
            continue
        target, ahead = aligned // block_size - 1, aligned - running
        if source == target:
            num_accepted_tokens_out[request] = 1
        if source != target or ahead:
            states = states or _states(layout)
            for state in states:
                state.move(WORD * request * block_table_stride_req, source, target, ahead)
