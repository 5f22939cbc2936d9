"""Rotations of queries and keys: compiled graphs call one operator for them and the write into the cache.

The pass is off unless the user sets ``VLLM_FL_FUSE_ROPE_KVCACHE``, because it made no engine faster. With it vLLM does
not split its graphs at that write (``compile.join_rotations``). Dynamo keeps the rotation whole, as a view, and a pass
finds each write with keys that such a view returns.

Captured pieces read the slots of a step at one address, with -1 after them and in dummy batches. The V1 runner ensures
this in ``_get_slot_mappings`` and ``_dummy_run``, the V2 runner in ``compute_slot_mappings`` and
``get_dummy_slot_mappings``, which fill ``slot_mappings``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fl_dispatch import get_default_manager
from fl_dispatch.logger_manager import get_logger

from ..attention.dense import ROTATION, AttentionFLImpl
from . import compile

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)
aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.reshape.default)
WRITE = "unified_kv_cache_update"
NAME = "rotate_and_cache"
# A reload must keep the library, because compiled graphs hold its operators.
_library: torch.library.Library | None = globals().get("_library")


def to_join(model: nn.Module, vllm_config: VllmConfig) -> Iterator[str]:
    """Yield the rotation, if every attention layer of the model can write rotated keys itself; prepare the layers."""
    if not getattr(vllm_config.compilation_config.pass_config, compile.ROTATIONS, False):
        return
    found = [module.impl for module in model.modules() if hasattr(module, "impl") and hasattr(module, "attn_backend")]
    if found and all(isinstance(impl, AttentionFLImpl) and impl.fl_join() for impl in found):
        _define()
        yield ROTATION
    else:
        logger.warning("%s: not every layer writes its own keys; none is joined", compile.ASKED_TO_JOIN)


# -- the operator of graphs -------------------------------------------------------------------------------------------


def _rotate_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    layer: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate and write; the last result, an empty tensor, makes every reader of the cache depend on the write."""
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    _, module, kv_cache, slots = get_attention_context(_resolve_layer_name(layer))
    impl: Any = module.impl
    rotated = impl.rotate_and_cache(module, query, key, value, cos, sin, positions, interleaved, kv_cache, slots)
    return *rotated, query.new_empty(0)


def _fake(query: Tensor, key: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), query.new_empty(0)


def _define() -> None:
    """Define the operator unless it exists. Its layer has the type that vLLM's own operators take."""
    from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

    global _library
    if _library is None:
        _library = torch.library.Library("vllm_fl", "FRAGMENT")
        _rotate_and_cache.__annotations__["layer"] = LayerNameType
        direct_register_custom_op(NAME, _rotate_and_cache, fake_impl=_fake, target_lib=_library)


# -- in a graph -------------------------------------------------------------------------------------------------------


def join(graph: Graph) -> int:
    """Replace each rotation with its write of keys into the cache; return the number of replaced pairs."""
    if ROTATION not in get_default_manager().state.whole:
        return 0
    writes = graph.find_nodes(op="call_function", target=getattr(torch.ops.vllm, WRITE).default)
    return sum(_join(graph, write) for write in writes)


def _join(graph: Graph, write: Node) -> bool:
    """Replace a write and the rotation of its keys by one operator; return whether that is possible."""
    key, value, layer = write.args
    rotation = _rotation_of(key)
    if rotation is None or not isinstance(layer, Node):
        return False
    *operands, interleaved, scope = rotation.args
    late = _between(graph, rotation, value)
    if scope or late is None:
        return False
    for node in late:
        rotation.prepend(node)
    query, key, *tables = operands
    with graph.inserting_before(rotation):
        target = getattr(torch.ops.vllm_fl, NAME).default
        call = graph.call_function(target, (query, key, value, *tables, interleaved, layer))
        written = graph.call_function(operator.getitem, (call, 2))
    call.meta = {name: value for name, value in rotation.meta.items() if name != "eager_input_vals"}
    call.meta["val"], written.meta = (*rotation.meta["val"], write.meta["val"]), dict(write.meta)
    rotation.replace_all_uses_with(call)
    write.replace_all_uses_with(written)
    graph.erase_node(write)
    graph.erase_node(rotation)
    return True


def _rotation_of(key: Any) -> Node | None:
    """Return the rotation that returned these keys, in its own shape."""
    result = key
    while result.target in RESHAPES:
        result = result.args[0]
    if (
        result.target is not operator.getitem
        or result.args[1] != 1
        or result.meta["val"].shape != key.meta["val"].shape
    ):
        return None
    view = getattr(torch.ops.fl_dispatch, ROTATION, None)
    return result.args[0] if view is not None and result.args[0].target is view.default else None


def _between(graph: Graph, rotation: Node, value: Any) -> list[Node] | None:
    """Return the nodes after the rotation that make a value; ``None`` if they need the rotation or write memory."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    found, left = set(), [value]
    while left:
        node = left.pop()
        if places[node] < places[rotation] or node in found:
            continue
        if node is rotation or node.op != "call_function" or node.is_impure():
            return None
        found.add(node)
        left += node.all_input_nodes
    return sorted(found, key=places.__getitem__)
