"""How a page of vLLM's KV cache holds keys and values: decided once, when a worker starts, from the policy.

vLLM hands a layer its cache as one tensor ``[blocks, kv_heads, block_size, head_size + head_size_v]`` and does not look
inside a page. So a page may be laid out as the chosen kernels want it, and all other implementations, which take views
in any strides, share it with them. An implementation asks for a layout with ``requires={"kv_layout": NAME}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fl_dispatch import get_default_manager, get_policy
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.selection.decision import select

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

OPERATORS = ("paged_attention", "kv_cache_write")


@dataclass(frozen=True)
class KVLayout:
    """One layout of a page.

    Args:
        name: the fact that implementations require: order of a block's axes in memory (slots N, heads H, dimensions D),
            of keys and of values where they differ.
        host_name: vLLM's name of the order that its tensor must have in memory.
        stride_order: the same as a permutation of the tensor's four axes.
        split: vLLM's tensor and the head size → keys and values as views ``[blocks, block_size, kv_heads, size]``.
    """

    name: str
    host_name: str
    stride_order: tuple[int, int, int, int]
    split: Callable[[Tensor, int], tuple[Tensor, Tensor]]


def _side_by_side(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """The value of a slot and head lies behind its key."""
    return kv_cache[..., :head_size].transpose(1, 2), kv_cache[..., head_size:].transpose(1, 2)


def _keys_transposed(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """A head's part of a page is ``[head_size, block_size]`` keys, then ``[block_size, head_size_v]`` values."""
    blocks, heads, block_size, size = kv_cache.shape
    page = kv_cache.view(blocks, heads, block_size * size)
    keys, values = page[..., : head_size * block_size], page[..., head_size * block_size :]
    return (
        keys.unflatten(-1, (head_size, block_size)).permute(0, 3, 1, 2),
        values.unflatten(-1, (block_size, size - head_size)).transpose(1, 2),
    )


DEFAULT = KVLayout("NHD", "LBNHC", (0, 2, 1, 3), _side_by_side)
LAYOUTS = {
    layout.name: layout
    for layout in (
        DEFAULT,
        KVLayout("HDN/HND", "LBHNC", (0, 1, 2, 3), _keys_transposed),  # the compiled kernels of vLLM's CPU build
    )
}

_in_force = DEFAULT


def in_force() -> KVLayout:
    """The layout of this process's cache."""
    return _in_force


def choose(vllm_config: VllmConfig) -> KVLayout:
    """Decide the layout, and state it to the dispatch core as the fact ``kv_layout``.

    It is the one that the first implementation in the policy's order requires, of attention before that of writing;
    for an operator with conditional rules the first rule counts whose choice requires one. The default stays where
    none requires any, and where pages go to other instances, which read them as vLLM describes them.
    """
    global _in_force
    _in_force = DEFAULT if vllm_config.kv_transfer_config is not None else _wanted()
    get_default_manager().set_facts(kv_layout=_in_force.name)
    return _in_force


def _wanted() -> KVLayout:
    manager, policy = get_default_manager(), get_policy()
    manager.ensure_initialized()
    for op in OPERATORS:
        decision = select(op, manager.registry.get_implementations(op), policy)
        for branch in decision.branches:
            name = branch.candidates[0].requires.get("kv_layout") if branch.candidates else None
            if name in LAYOUTS:
                logger.info("KV cache layout %s: '%s' of '%s' needs it", name, branch.candidates[0].impl_id, op)
                return LAYOUTS[name]
    return DEFAULT
