"""The layout of vLLM's KV cache in memory: the policy decides it once, when a worker starts.

vLLM passes a layer its cache as one tensor ``[blocks, kv_heads, block_size, head_size + head_size_v]`` and does not
read blocks. So a block may have the layout of the chosen kernels. All other implementations can use it, because they
take views in any strides. :mod:`fl_dispatch.hosting.memory.kv_layout` has the layouts and the rules of the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.memory.kv_layout import KVLayout, Preference
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops.attention import SCALES, TOKEN_SCALES
from fl_dispatch.ops.mla import LATENT_SCALES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)

PLAIN_DTYPES = ("auto", "float32", "bfloat16", "float16")
FP8_DTYPES = ("fp8", "fp8_e4m3")
"""vLLM's two names of float8_e4m3fn. It passes such a cache as bytes."""
INT8_DTYPE = "int8_per_token_head"
"""vLLM's name of int8 with a scale for each token and head."""
QUANTIZED_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**dict.fromkeys(FP8_DTYPES, (*SCALES, *LATENT_SCALES)), INT8_DTYPE: TOKEN_SCALES}
)
"""Names of quantized caches, each with the operators' parameters for its scales."""
SCALE_BYTES = torch.float32.itemsize
"""Bytes of a scale, which vLLM stores after each head's key and value in int8."""
DEFAULT = KVLayout.parse("NHD")
HOST_ORDERS = {"N": "LBNHC", "H": "LBHNC"}
"""First axis of the keys → vLLM's name for the order of its tensor in memory.

Both names are of blocks in one piece; any such name would do.
"""

_in_force, _multiple, _block = DEFAULT, 1, 1


def in_force() -> KVLayout:
    """Return the layout of this process's cache."""
    return _in_force


def block_multiple() -> int:
    """Return the number that must divide a block's slots."""
    return _multiple


def usual_block(default: int) -> int:
    """Return the default slots of a block: vLLM's default, or a multiple of it that makes kernels faster."""
    return -(-_block // default) * default if _block > default else default


def host_order() -> str:
    """Return vLLM's name of its tensor's order in memory."""
    return HOST_ORDERS.get(_in_force.keys[0], HOST_ORDERS["N"])


def choose(vllm_config: VllmConfig) -> KVLayout:
    """Decide layout and block size, and state them to the dispatch core.

    The default layout stays if no first choice needs another, and if blocks leave the cache (to other instances or
    other memory), because their readers expect vLLM's order. It also stays for an int8 cache, because its scales are
    next to each head's numbers; and for a model with states, which vLLM keeps in whole blocks, if the other layout has
    no whole blocks. A block size that the user chose stays, too.
    """
    global _in_force, _multiple, _block
    cache = vllm_config.cache_config
    preferred = Preference() if cache.cache_dtype == INT8_DTYPE else kv_layout.preference()
    travel = vllm_config.kv_transfer_config is not None
    if travel and preferred.layout is not None and not preferred.optional:
        logger.warning(
            "KV cache layout %s, not %s: blocks go elsewhere (KV transfer)", DEFAULT.name, preferred.layout.name
        )
    model = vllm_config.model_config
    keeps_states = model is not None and (model.is_hybrid or model.is_attention_free)
    shared = keeps_states and preferred.layout is not None and not preferred.layout.whole_blocks
    fixed = cache.block_size if cache.user_specified_block_size else None
    unfit = preferred.optional and fixed is not None and fixed % preferred.block != 0
    _in_force = DEFAULT if travel or shared or unfit or preferred.layout is None else preferred.layout
    _multiple = preferred.multiple if fixed is None or fixed % preferred.multiple == 0 else 1
    _block = preferred.block
    usual = usual_block(type(cache).DEFAULT_BLOCK_SIZE)
    block_size = fixed or (usual if usual % _multiple == 0 else _multiple)
    kv_layout.state(_in_force, block_size)
    return _in_force


def refuse_unlike_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse groups of layers that vLLM lets share memory if their blocks would overlap.

    A block's number belongs to one group at a time, which suffices for blocks of one piece. In a layout with all keys
    before all values, the groups' keys must also have equal sizes.

    Raises:
        ValueError: their sizes differ.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec  # 0.33 reads its platform while it is imported

    if _in_force.whole_blocks:
        return
    layers_of: dict[int, str] = {}
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
            group.layer_names, group.kv_cache_spec
        )
        for layer, spec in specs.items():
            if isinstance(spec, MambaSpec):
                raise ValueError(
                    f"layers share the memory of their KV cache, and its layout {_in_force.name} does not allow that, "
                    f"because {layer} keeps states in it, one in each block; choose another implementation of "
                    "'paged_attention' and 'kv_cache_write'"
                )
            if isinstance(spec, AttentionSpec):
                layers_of.setdefault(spec.block_size * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize, layer)
    if len(kv_cache_config.kv_cache_groups) > 1 and len(layers_of) > 1:
        sizes = ", ".join(f"{size} bytes in {layer}" for size, layer in layers_of.items())
        raise ValueError(
            f"layers share the memory of their KV cache, and its layout {_in_force.name} does not allow that, because "
            f"a block's keys differ: {sizes}; choose another implementation of 'paged_attention' and 'kv_cache_write', "
            "or set disable_hybrid_kv_cache_manager"
        )


def split(layout: KVLayout, kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values as views ``[blocks, block_size, kv_heads, size]`` of vLLM's tensor."""
    _, heads, block_size, size = kv_cache.shape
    return layout.split(kv_cache, block_size, heads, head_size, size - head_size)


def split_scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split such a view in int8 into keys or values, and the scales after them, ``[blocks, block_size, kv_heads]``."""
    return rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].view(torch.float32).squeeze(-1)
