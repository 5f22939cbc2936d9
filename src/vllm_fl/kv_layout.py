"""How vLLM's KV cache lies in memory: decided once, when a worker starts, from the policy.

vLLM hands a layer its cache as one tensor ``[blocks, kv_heads, block_size, head_size + head_size_v]`` and does not look
inside a block. So a block may be laid out as the chosen kernels want it, and all other implementations, which take
views in any strides, share it with them. :mod:`fl_dispatch.hosting.kv_layout` has the layouts and who decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fl_dispatch.hosting import kv_layout
from fl_dispatch.hosting.kv_layout import KVLayout
from fl_dispatch.logger_manager import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

DEFAULT = KVLayout.parse("NHD")
HOST_ORDERS = {"N": ("LBNHC", (0, 2, 1, 3)), "H": ("LBHNC", (0, 1, 2, 3))}
"""First axis of the keys → vLLM's name of the order of its tensor in memory, and the same as a permutation.

A block is one piece in both; vLLM only has to name one.
"""

_in_force, _multiple = DEFAULT, 1


def in_force() -> KVLayout:
    """The layout of this process's cache."""
    return _in_force


def block_multiple() -> int:
    """The number of which the slots of a block have to be a multiple."""
    return _multiple


def host_order() -> tuple[str, tuple[int, int, int, int]]:
    """vLLM's name of the order that its tensor has in memory, and the same as a permutation of its four axes."""
    return HOST_ORDERS.get(_in_force.keys[0], HOST_ORDERS["N"])


def choose(vllm_config: VllmConfig) -> KVLayout:
    """Decide layout and block size, and state them to the dispatch core.

    The default layout stays where nobody needs another, and where blocks go elsewhere (to other instances, to other
    memory), because who reads them there knows vLLM's own order. A block size that the user chose stays, too.
    """
    global _in_force, _multiple
    wish, cache = kv_layout.wish(), vllm_config.cache_config
    travel = vllm_config.kv_transfer_config is not None
    if travel and wish.layout is not None:
        logger.warning("KV cache layout %s, not %s: blocks go elsewhere (KV transfer)", DEFAULT.name, wish.layout.name)
    _in_force = DEFAULT if travel or wish.layout is None else wish.layout
    fixed = cache.block_size if cache.user_specified_block_size else None
    _multiple = wish.multiple if fixed is None or fixed % wish.multiple == 0 else 1
    usual = type(cache).DEFAULT_BLOCK_SIZE
    block_size = fixed or (usual if usual % _multiple == 0 else _multiple)
    kv_layout.state(_in_force, block_size)
    return _in_force


def split(layout: KVLayout, kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer as views ``[blocks, block_size, kv_heads, size]`` of vLLM's tensor."""
    _, heads, block_size, size = kv_cache.shape
    return layout.split(kv_cache, block_size, heads, head_size, size - head_size)
