"""Steps of one token: their graphs call one operator for a product, the norm before it and the gate after it.

Such a step is bound by memory traffic, and by small kernels between the products. The range of exactly one token is
compiled separately, and all other graphs stay unchanged. A row that an fp8 product quantizes need not be quantized in
this range, because each weight is multiplied once.

Norms and gated activations appear in a graph as views, if :mod:`.quantized_results` keeps them whole, or as launches of
Triton kernels that Dynamo has traced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fl_dispatch import call_op, get_default_manager, get_policy
from fl_dispatch.hosting.start import first_choices
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import get_settings
from fl_dispatch.types import BackendImplKind

from ..compat import versions
from . import compile
from .quantized_results import QUANTIZE, functionalized, view

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

FUSED = compile.FUSED
PRODUCTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"linear": (), "weight_only_linear": (), "scaled_linear": (QUANTIZE,)}
)
"""Product → the operators on its rows before it."""
NORM, GATE = "rms_norm", "silu_and_mul"
KEY = "fl_dispatch_one_token"
"""The key of the fused products in vLLM's ``additional_config``, which is part of its compile-cache key."""
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


# -- before anything is compiled --------------------------------------------------------------------------------------


def prepare(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Compile the range of one token separately if products are to be fused there, before dispatch is frozen.

    The fused operator is called for each type of weights, so that it is proven before a graph uses it. The fused
    products become a part of vLLM's compile-cache key.
    """
    products = to_join(vllm_config)
    kinds = {weight.dtype for weight in _weights(model)} if products else set()
    if not kinds:
        return
    dtype, device = vllm_config.model_config.dtype, next(model.parameters()).device
    samples = [*_samples(kinds, dtype, device)]
    for sample in samples:
        call_op(FUSED, *sample)
    if not samples or FUSED in get_default_manager().get_failed_impls():
        return
    compilation = vllm_config.compilation_config
    # vLLM drops an end of one token from its configuration, and reads the ranges when it compiles.
    compilation.compile_ranges_endpoints = sorted({1, *(compilation.compile_ranges_endpoints or ())})
    vllm_config.additional_config[KEY] = sorted(products)
    logger.info("%s: joined with norms and gates in graphs of one token", ", ".join(sorted(products)))


def joined_products(vllm_config: VllmConfig) -> frozenset[str]:
    """Return the products that :func:`prepare` found right; none before it ran."""
    return frozenset(vllm_config.additional_config.get(KEY, ()))


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of linear layers, plain or packed."""
    for module in model.modules():
        for name in ("weight", "weight_packed", "qweight"):
            weight = vars(module)["_parameters"].get(name)
            if weight is not None and weight.dim() == 2:
                yield weight


def _samples(kinds: set[torch.dtype], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of one row that some kernel takes: for each type of weights with a gate, and without."""
    declared = OPERATORS[FUSED].samples
    assert declared is not None
    left = {(kind, gated) for kind in kinds for gated in (False, True)}
    for sample in declared(dtype, device, torch.Generator().manual_seed(0)):
        row, weight, *_, gated = sample.args
        if (weight.dtype, gated) in left and row.shape[:-1].numel() == 1 and _is_taken(sample.args):
            left.remove((weight.dtype, gated))
            yield sample.args


def to_join(vllm_config: VllmConfig) -> frozenset[str]:
    """Return the products that graphs of one token fuse; none if there is a reason against it."""
    if why_apart(vllm_config):
        return frozenset()
    return frozenset(product for product in PRODUCTS if _may_join(product))


def why_apart(vllm_config: VllmConfig) -> list[str]:
    """List every reason against fusing any product."""
    found = [
        (not get_settings().fuse_one_token, f"{compile.ASKED_TO_FUSE} is off"),
        (not versions.is_tested(), "it was not tested with this vLLM"),
        (
            not compile.has_passes(vllm_config.compilation_config),
            "our passes run in graphs that VLLM_COMPILE compiles with Inductor",
        ),
        (get_policy().batch_invariant, "a row must not depend on the batch"),
        (
            getattr(vllm_config.compilation_config, "compile_mm_encoder", False),
            "graphs of a compiled encoder may have one size",
        ),
        (
            vllm_config.model_config.uses_mrope,
            "a graph of one size expects other strides of positions that have several axes than vLLM gives it",
        ),
    ]
    return [why for holds, why in found if holds]


def _may_join(product: str) -> bool:
    """Whether a product may be fused: the user chooses no part's implementation, and all parts are of one backend."""
    parts = (product, *PRODUCTS[product], NORM, GATE)
    return first_choices.joins(FUSED, parts, 1) and first_choices.of_one_backend(FUSED, parts, 1)


# -- in a graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """A product in a graph: its operands as in ``fused_linear``, and the nodes that can go with it, last first."""

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


def join(graph: Graph, products: frozenset[str]) -> int:
    """Fuse each product of one row with its norm and gate; return the number of fused products."""
    joined = 0
    for product in sorted(products):
        found = view(product)
        for node in graph.find_nodes(op="call_function", target=found) if found else ():
            joined += _join(graph, node, product)
    return joined


def _join(graph: Graph, node: Any, name: str) -> bool:
    """Fuse one product with its norm and gate, or with its gate alone; return whether an implementation takes that."""
    product = _product(node, name)
    if product is None or not _is_row(product.row):
        return False
    gate = _gate(node)
    for norm in dict.fromkeys((_norm(product), None)):
        if norm is None and not PRODUCTS[name]:  # fusing a gate alone gains nothing
            return False
        x = product.row if norm is None else norm.x
        more = (None, None, 1e-6) if norm is None else (norm.weight, norm.residual, norm.epsilon)
        operands = (x, *product.operands, *more, gate is not None)
        if _is_taken(operands):
            break
    else:
        return False
    last = node if gate is None else gate.result
    total = x.meta["val"].new_empty(0) if norm is None or norm.residual is None else norm.residual.meta["val"]
    with graph.inserting_before(node if norm is None else norm.node):
        call = graph.call_function(view(FUSED), (*operands, ""))
        results = [graph.call_function(operator.getitem, (call, place)) for place in (0, 1)]
    call.meta = {key: value for key, value in node.meta.items() if key not in ("eager_input_vals", "val")}
    call.meta["val"] = (last.meta["val"], total)
    for result, value in zip(results, call.meta["val"], strict=True):
        result.meta = {**call.meta, "val": value}
    last.replace_all_uses_with(results[0])
    if norm is not None and norm.total is not None:
        norm.total.replace_all_uses_with(results[1])
    dead = [*(() if gate is None else gate.nodes), *product.nodes]
    if norm is not None:
        dead += [*norm.node.users, norm.node, *_buffers(norm.node)]
    _erase(graph, [*dead, results[1]])
    return True


def _erase(graph: Graph, nodes: list[Any]) -> None:
    """Erase unused nodes among these, in this order."""
    for node in dict.fromkeys(nodes):
        if not node.users:
            graph.erase_node(node)


def _is_row(x: Any) -> bool:
    """Whether a tensor is one row, in every batch of the graph's range."""
    shape = x.meta["val"].shape
    return len(shape) > 1 and all(isinstance(size, int) and size == 1 for size in shape[:-1])


def _is_taken(operands: tuple[Any, ...]) -> bool:
    """Whether an implementation other than the reference takes a call."""
    manager = get_default_manager()
    given = (one.meta["val"] if isinstance(one, Node) else one for one in operands)
    chosen = manager.registry.get_implementation(FUSED, manager.get_selected_impl_id(FUSED, *given))
    return chosen is not None and chosen.kind is not BackendImplKind.REFERENCE


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
