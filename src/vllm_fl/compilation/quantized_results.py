"""Norms and gated activations with a quantized result: compiled graphs call one operator for both.

Dynamo keeps the calls whole, as views, and a pass finds each one with a result that only quantizations use. vLLM's own
switches enable it: ``pass_config.fuse_norm_quant`` and ``fuse_act_quant``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.layers.attribute import replaced
from fl_dispatch.hosting.layers.layer_kernels import kernels
from fl_dispatch.hosting.quantized.layers import ScaledLayer
from fl_dispatch.hosting.start import first_choices
from fl_dispatch.logger_manager import get_logger

from ..attention.dense import ROTATION
from . import compile, rotary_cache

if TYPE_CHECKING:
    from vllm.config import PassConfig, VllmConfig

logger = get_logger(__name__)

QUANTIZE = "quantize"
JOINED: Mapping[str, str] = MappingProxyType({"rms_norm": "rms_norm_quantize", "silu_and_mul": "silu_and_mul_quantize"})
"""Operator → the operator that also quantizes its result."""
functionalized = torch.ops.higher_order.auto_functionalized
"""The operator of views that write, in graphs that vLLM makes Inductor trace."""


# -- before anything is compiled --------------------------------------------------------------------------------------


def without_hosts_passes(config: PassConfig) -> AbstractContextManager[None]:
    """Stop vLLM from adding its own passes for the calls that ours fuse, because they need its CUDA library."""
    return replaced(config, **{name: False for name in compile.JOINED_BY_US.values() if hasattr(config, name)})


def keep_whole(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Keep the calls that the pass may fuse in graphs, before dispatch is frozen."""
    wanted = {*_to_join(model, vllm_config), *rotary_cache.to_join(model, vllm_config)}
    found = get_default_manager().keep_whole(wanted)
    if joins := found & set(JOINED):
        logger.info("%s: joined with the quantization of their results, in compiled graphs", ", ".join(sorted(joins)))
    if ROTATION in found:
        logger.info("%s: may be joined with the write of keys and values, in compiled graphs", ROTATION)


def _to_join(model: nn.Module, vllm_config: VllmConfig) -> Iterator[str]:
    """Yield operators to fuse, if the model quantizes rows and the policy allows it."""
    compilation = vllm_config.compilation_config
    if not compile.has_passes(compilation) or not any(isinstance(one, ScaledLayer) for _, _, one in kernels(model)):
        return
    for part, joined in JOINED.items():
        wanted = getattr(compilation.pass_config, compile.JOINED_BY_US[part], False)
        if wanted and first_choices.joins(joined, (part, QUANTIZE)):
            yield part


# -- in a graph -------------------------------------------------------------------------------------------------------


def join(graph: Graph) -> int:
    """Replace each call with a result that only equal quantizations use; return the number of replaced calls."""
    joined = 0
    for part in sorted(get_default_manager().state.whole & set(JOINED)):
        for node in graph.find_nodes(op="call_function", target=view(part)):
            joined += _join_plain(graph, node, part)
    if "rms_norm" in get_default_manager().state.whole:
        for node in graph.find_nodes(op="call_function", target=functionalized):
            if node.args[0] is view("rms_norm_"):
                joined += _join_in_place(graph, node)
    return joined


def view(name: str) -> Any:
    """Return one of our operators in graphs, or ``None`` if it was not registered there."""
    found = getattr(torch.ops.fl_dispatch, name, None)
    return found and found.default


def _join_plain(graph: Graph, node: Node, part: str) -> bool:
    """Fuse a call that writes nothing: ``(x, *others, scope) -> y``."""
    *operands, scope = node.args
    found = _quantizations(node)
    if scope or not found:
        return False
    x, *others = operands
    _, dtype, *how, _ = found[0].args
    with graph.inserting_before(node):
        call = graph.call_function(view(JOINED[part]), (x, dtype, *others, *how, ""))
    _take_over(graph, call, found)
    graph.erase_node(node)
    return True


def _join_in_place(graph: Graph, node: Node) -> bool:
    """Fuse the norm with a residual. Its view writes the results into ``x`` and ``residual`` and returns them."""
    given: dict[str, Any] = dict(node.kwargs)
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    y, total = results.get(1), results.get(2)  # the first result is the view's own: none
    if y is None or given["scope"] or len(results) != len(node.users) or not (found := _quantizations(y)):
        return False
    _, dtype, group_size, scale, _ = found[0].args
    with graph.inserting_before(node):
        more = {"dtype": dtype, "group_size": group_size, "scale": scale}
        call = graph.call_function(functionalized, (view(f"{JOINED['rms_norm']}_"),), {**given, **more})
    _take_over(graph, call, found)
    call.meta["val"] = (*call.meta["val"], given["residual"].meta["val"])
    graph.erase_node(y)
    if total is not None:
        total.update_arg(0, call)
    graph.erase_node(node)
    return True


def _quantizations(y: Node) -> list[Node]:
    """Return the quantizations that are a result's only users, if all are equal and could move to its place."""
    users = list(y.users)
    if not users or any(user.target is not view(QUANTIZE) or user.args[0] is not y for user in users):
        return []
    *_, scale, scope = users[0].args
    placed = scale is None or (isinstance(scale, Node) and scale.op in ("placeholder", "get_attr"))
    alike = all(user.args[1:] == users[0].args[1:] for user in users)
    return users if placed and alike and not scope else []


def _take_over(graph: Graph, call: Node, quantizations: list[Node]) -> None:
    """Replace quantizations by a call that returns their results first."""
    call.meta = {key: value for key, value in quantizations[0].meta.items() if key != "eager_input_vals"}
    for quantization in quantizations:
        for result in list(quantization.users):
            result.update_arg(0, call)
        graph.erase_node(quantization)
