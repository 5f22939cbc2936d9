"""The graph of one token: each product with its norm and gate becomes one call of ``fused_linear``.

    row, total = norm(x, residual, weight, epsilon)    a view, or a launched kernel that Dynamo has traced
    q, q_scale = quantize(row)                         only before ``scaled_linear``
    y = product(row, weight, ...)                      a view
    result = gate(y)                                   as the norm

becomes ``result, total = fused_linear(x, weight, ..., norm_weight, residual, epsilon, gated)``. The norm or the gate
may be absent. A row need not be quantized for an fp8 product, because each weight is multiplied once. Norms and gates
are views if :mod:`.quantized_results` keeps them whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from .one_token import FUSED, GATE, NORM, PRODUCTS, is_taken
from .quantized_results import QUANTIZE, functionalized, view

KERNELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        NORM: ("fl_dispatch.backends.triton.impl.rows.normalization", "_norm"),
        GATE: ("fl_dispatch.backends.triton.impl.rows.activation", "_gated"),
    }
)
"""Operator → module and name of the kernel that a traced call launches. They are names, so that no backend is
imported."""
launched = torch.ops.higher_order.triton_kernel_wrapper_functional
"""The operator that launches a Triton kernel in a graph."""
BUFFERS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_strided.default)
"""Operators that allocate the results of a launched kernel."""


@dataclass(frozen=True)
class _Product:
    """A product in a graph.

    Args:
        row: its input before any quantization.
        operands: its weight, scale, zero and bias.
        taker: the node that reads the row.
        nodes: those that can go with it, last first.
    """

    row: Any
    operands: tuple[Any, ...]
    taker: Any
    nodes: tuple[Any, ...]


@dataclass(frozen=True)
class _Norm:
    """A norm in a graph: its operands, the node that computes it, and the sum that it returns."""

    x: Any
    residual: Any
    weight: Any
    epsilon: float
    node: Any
    total: Any


@dataclass(frozen=True)
class _Gate:
    """A gated activation in a graph: its result, and the nodes that can go with it, last first."""

    result: Any
    nodes: tuple[Any, ...]


@dataclass(frozen=True)
class _Fusion:
    """A product that an implementation takes together with its norm, its gate, or both.

    Args:
        operands: the arguments of ``fused_linear`` without the scope.
    """

    operands: tuple[Any, ...]
    product: _Product
    norm: _Norm | None
    gate: _Gate | None


def join(graph: Graph, products: frozenset[str]) -> int:
    """Fuse each product of one row with its norm and gate; return the number of fused products."""
    joined = 0
    for name in sorted(products):
        found = view(name)
        for node in graph.find_nodes(op="call_function", target=found) if found else ():
            if (fusion := _fusion(node, name)) is not None:
                _replace(graph, fusion)
                joined += 1
    return joined


def _fusion(node: Any, name: str) -> _Fusion | None:
    """Match a product with its norm and gate, or with its gate alone if no implementation takes the norm."""
    product = _product(node, name)
    if product is None or not _is_row(product.row):
        return None
    gate = _gate(node)
    for norm in dict.fromkeys((_norm(product), None)):
        if norm is None and not PRODUCTS[name]:  # fusing a gate alone gains nothing
            break
        x = product.row if norm is None else norm.x
        of_norm = (None, None, 1e-6) if norm is None else (norm.weight, norm.residual, norm.epsilon)
        operands = (x, *product.operands, *of_norm, gate is not None)
        if is_taken(operands):
            return _Fusion(operands, product, norm, gate)
    return None


def _replace(graph: Graph, fusion: _Fusion) -> None:
    """Replace the nodes of a fusion by one call, where the first of them was."""
    node, norm, gate = fusion.product.nodes[0], fusion.norm, fusion.gate
    last = node if gate is None else gate.result
    total = last.meta["val"].new_empty(0) if norm is None or norm.residual is None else norm.residual.meta["val"]
    with graph.inserting_before(node if norm is None else norm.node):
        call = graph.call_function(view(FUSED), (*fusion.operands, ""))
        results = [graph.call_function(operator.getitem, (call, place)) for place in (0, 1)]
    call.meta = {key: value for key, value in node.meta.items() if key not in ("eager_input_vals", "val")}
    call.meta["val"] = (last.meta["val"], total)
    for result, value in zip(results, call.meta["val"], strict=True):
        result.meta = {**call.meta, "val": value}
    last.replace_all_uses_with(results[0])
    if norm is not None and norm.total is not None:
        norm.total.replace_all_uses_with(results[1])
    dead = [*(() if gate is None else gate.nodes), *fusion.product.nodes]
    if norm is not None:
        dead += [*norm.node.users, norm.node, *_buffers(norm.node)]
    _erase(graph, [*dead, results[1]])


def _erase(graph: Graph, nodes: list[Any]) -> None:
    """Erase unused nodes among these, in this order."""
    for node in dict.fromkeys(nodes):
        if not node.users:
            graph.erase_node(node)


def _is_row(x: Any) -> bool:
    """Whether a tensor is one row, in every batch of the graph's range."""
    shape = x.meta["val"].shape
    return len(shape) > 1 and all(isinstance(size, int) and size == 1 for size in shape[:-1])


def _product(node: Any, name: str) -> _Product | None:
    """Match a product with plain weights, or with fp8 of one scale or one per column and a row quantized for it."""
    *operands, scope = node.args
    if scope:
        return None
    if name == "linear":
        row, weight, bias = operands
        return _Product(row, (weight, None, None, bias), node, (node,))
    if name == "weight_only_linear":
        row, weight, scale, zero, bias = operands
        return _Product(row, (weight, scale, zero, bias), node, (node,))
    q, q_scale, weight, scale, bias, dtype, block = operands
    quantization: Any = q.args[0] if q.target is operator.getitem else q
    if quantization.target is not view(QUANTIZE) or block:
        return None
    row, kind, *_, quantized_for = quantization.args
    of_both = q_scale.target is operator.getitem and q_scale.args == (quantization, 1) and q.args[1] == 0
    plain = kind == "float8_e4m3fn" and not quantized_for and f"torch.{dtype}" == str(row.meta["val"].dtype)
    alike = bias is None or bias.meta["val"].dtype is row.meta["val"].dtype
    if not of_both or not plain or not alike:
        return None
    return _Product(row, (weight, scale, None, bias), quantization, (node, q, q_scale, quantization))


def _norm(product: _Product) -> _Norm | None:
    """Return the norm that makes a product's row, if only the product uses it and could be computed in its place."""
    row = product.row
    given = [one for one in product.operands if isinstance(one, Node)]
    others = [user for node in product.nodes[1:] for user in node.users if user not in product.nodes]
    if list(row.users) != [product.taker] or others or any(one.op not in ("placeholder", "get_attr") for one in given):
        return None
    found = _whole_norm(row) or _traced_norm(row)
    if found is None:
        return None
    alike = (row, found.x, found.weight, *(() if found.residual is None else (found.residual,)))
    same = len({one.meta["val"].dtype for one in alike}) == 1 and found.x.meta["val"].shape == row.meta["val"].shape
    return found if same else None


def _whole_norm(row: Any) -> _Norm | None:
    """Return a norm that is a view."""
    if row.target is view(NORM):
        x, weight, epsilon, scope = row.args
        return None if scope or weight is None else _Norm(x, None, weight, epsilon, row, None)
    results = _results(row)
    if results is None or results[0].target is not functionalized or results[0].args[0] is not view(f"{NORM}_"):
        return None
    source, found = results
    given: dict[str, Any] = dict(source.kwargs)
    if row is not found.get(1) or {*found} - {1, 2} or given["scope"] or given["weight"] is None:
        return None
    return _Norm(given["x"], given["residual"], given["weight"], given["epsilon"], source, found.get(2))


def _traced_norm(row: Any) -> _Norm | None:
    """Return a norm that is a kernel launch."""
    if (results := _results(row)) is None or (constants := _launch(results[0], NORM)) is None:
        return None
    source, found = results
    given: dict[str, Any] = dict(source.kwargs["kwargs"])
    adds = constants.get("HAS_RESIDUAL")
    ours = constants.get("HAS_WEIGHT") is True and constants.get("GEMMA") is False and isinstance(adds, bool)
    whole = constants.get("HIDDEN") == row.meta["val"].shape[-1] and constants.get("INNER") == 1
    if not ours or not whole or row is not found.get("out") or {*found} - {"out", *(("total_out",) if adds else ())}:
        return None
    residual = given["residual"] if adds else None
    return _Norm(given["x"], residual, given["weight"], constants["EPSILON"], source, found.get("total_out"))


def _gate(product: Any) -> _Gate | None:
    """Return the gated activation that is the only user of a product."""
    takers = [user for user in product.users if not _is_buffer(user)]
    if len(takers) != 1:
        return None
    (taker,) = takers
    if taker.target is view(GATE):
        return None if taker.args[1] or len(product.users) > 1 else _Gate(taker, (taker,))
    constants, results = _launch(taker, GATE), [*taker.users]
    if constants is None or len(results) != 1 or constants.get("ACTIVATION") != "silu":
        return None
    (result,), given = results, dict(taker.kwargs["kwargs"])
    shape, columns = product.meta["val"].shape, product.meta["val"].shape[-1]
    whole = constants.get("WIDTH") == columns // 2 and result.meta["val"].shape == (*shape[:-1], columns // 2)
    buffers = _buffers(taker)
    others = [user for user in product.users if user is not taker and user not in buffers]
    if result.target is not operator.getitem or result.args[1] != "out" or not whole or others:
        return None
    return _Gate(result, (result, taker, *buffers)) if given["x"] is product else None


def _results(row: Any) -> tuple[Any, dict[Any, Any]] | None:
    """Return the multi-output node that makes this result, and all of its used results."""
    if row.target is not operator.getitem or not isinstance(source := row.args[0], Node):
        return None
    users = [*source.users]
    found = {user.args[1]: user for user in users if user.target is operator.getitem}
    return (source, found) if len(found) == len(users) else None


def _launch(node: Any, op_name: str) -> Mapping[str, Any] | None:
    """Return the constants of a launch of an operator's kernel; ``None`` for another node."""
    if node.target is not launched:
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    while hasattr(kernel, "fn"):  # once with its configurations, then in Triton's form
        kernel = kernel.fn
    named = (kernel.__module__, kernel.__name__)
    constants: Mapping[str, Any] = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
    return constants if named == KERNELS[op_name] else None


def _is_buffer(node: Any) -> bool:
    return node.target in BUFFERS


def _buffers(launch: Any) -> tuple[Any, ...]:
    """Return the new buffers that only this launch writes."""
    if launch.target is not launched:
        return ()
    given = launch.kwargs["kwargs"]
    written = dict.fromkeys(given[name] for name in ("out", "total_out") if name in given)
    return tuple(one for one in written if _is_buffer(one) and set(one.users) <= {launch})
