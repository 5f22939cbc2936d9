"""A table of the operator calls of a model's layers: operator, shapes, and calls in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...ops import OPERATORS, Place
from ...ops.inputs import shapes
from ..cases import Case
from .model import Dimensions
from .weights import Weights

Make = Callable[[Place, int], tuple[Any, ...]]
"""Place and tokens → arguments."""
ROUTER = "router"
"""The product that scores experts; no served checkpoint quantizes its weights."""
MOST_CACHED = {True: 1 << 18, False: 1 << 14}
"""Largest number of keys of all requests for which attention is measured, on an accelerator and on a CPU."""


@dataclass(frozen=True)
class Call:
    """One call of a step, for any number of tokens.

    Args:
        op_name, label: the operator, and the call's difference from its others.
        times: how often a step of the whole model makes it.
        make: makes its arguments.
        width: the call's width.
    """

    op_name: str
    label: str
    times: int
    make: Make
    width: int


@dataclass(frozen=True)
class Key:
    """The facts by which a rule can distinguish calls."""

    op_name: str
    dtype: str
    tokens: int
    phase: str | None

    def __str__(self) -> str:
        return f"{self.op_name}, {self.dtype}, {self.tokens} tokens" + (f", {self.phase}" if self.phase else "")


@dataclass(frozen=True)
class TunedCase:
    """One shape of a key, and how often a step calls the operator with it.

    Args:
        key: the facts of the call that a rule can test.
        case: the shape.
        times: calls in a step.
        step: tokens of the step that makes the call; the key's may be others, because heads count as tokens.
        at: returns the same call's shape in a step of other tokens.
    """

    key: Key
    case: Case
    times: int
    step: int
    at: Callable[[int], Case]

    @property
    def name(self) -> str:
        """Return the key and the shape in one line, the same in every run."""
        return ", ".join(filter(None, (str(self.key), self.case.label, f"width {self.case.width}")))


def row_calls(model: Dimensions) -> Iterator[Call]:
    """Yield the calls with arguments that depend only on the number of tokens."""
    for name, columns, inner, times in _products(model):
        if columns and inner and times:
            yield from _product_calls(None if name == ROUTER else model.weights, name, columns, inner, times)
    if model.norm == "layer_norm":
        yield Call("layer_norm", "", 2 * model.layers, partial(_layer_norm, hidden=model.hidden), model.hidden)
    else:
        both = 2 * model.layers
        yield Call(model.norm, "with residual", both, _wide(shapes.add_and_normalize, model.hidden), model.hidden)
        yield Call(model.norm, "", 1, _wide(shapes.normalize, model.hidden), model.hidden)
        if model.normalizes_heads:
            for name, heads in (("query heads", model.heads), ("key heads", model.kv_heads)):
                make = partial(shapes.normalize_heads, heads=heads, head_dim=model.head_dim)
                yield Call(model.norm, name, model.layers, make, model.head_dim)
    for inner, times in ((model.inner, model.dense_layers), (model.shared_inner, model.expert_layers)):
        if inner and times and model.activation in OPERATORS:
            yield Call(model.activation, "", times, lambda place, n, w=inner: (place.normal(n, 2 * w),), inner)  # type: ignore[misc]
    if model.experts:
        yield from _expert_calls(model)
    if not model.latent_rank:
        part, width = model.rotated, model.heads * model.head_dim
        rotate = partial(shapes.rotate, kv_heads=model.kv_heads, head_dim=model.head_dim, part=part)
        yield Call("rotary_embedding", "", model.layers, _wide(rotate, width), width)
        write, width = partial(shapes.write, head_dim=model.head_dim), model.kv_heads * model.head_dim
        yield Call("kv_cache_write", "", model.layers, _wide(write, width), width)


def _product_calls(weights: Weights | None, name: str, columns: int, inner: int, times: int) -> Iterator[Call]:
    if weights is None:
        yield Call("linear", name, times, _wide(shapes.multiply(columns), inner), inner)
    elif weights.inputs:
        yield Call("quantize", name, times, _wide(partial(_quantize, weights), inner), inner)
        product = shapes.multiply_scaled(columns, weights.kind, weights.block)
        yield Call(weights.operator, name, times, _wide(product, inner), inner)
    else:
        weights = weights.of_rows(inner)
        product = shapes.multiply_weight_only(columns, weights.kind, weights.group, weights.zeros)
        yield Call(weights.operator, name, times, _wide(product, inner), inner)


def _quantize(weights: Weights, place: Place, tokens: int, inner: int) -> tuple[Any, ...]:
    if weights.static:
        return place.normal(tokens, inner), weights.dtype, -1, place.normal(1, dtype=torch.float32).abs_()
    return place.normal(tokens, inner), weights.dtype, weights.block


def _wide(make: Callable[[Place, int, int], tuple[Any, ...]], width: int) -> Make:
    return lambda place, tokens: make(place, tokens, width)


def _products(model: Dimensions) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, columns, inner size and number of the products in a step."""
    if model.latent_rank:
        yield "latent", model.latent_rank + model.latent_rope + model.query_rank, model.hidden, model.layers
        yield "output", model.hidden, model.heads * shapes.LATENT_DIM, model.layers
    else:
        width = model.heads * model.head_dim
        yield "query, key and value", width + 2 * model.kv_heads * model.head_dim, model.hidden, model.layers
        yield "output", model.hidden, width, model.layers
    yield ROUTER, model.experts, model.hidden, model.expert_layers
    for name, inner, layers in (
        ("", model.inner, model.dense_layers),
        ("shared ", model.shared_inner, model.expert_layers),
    ):
        yield f"{name}gate and up", 2 * inner, model.hidden, layers
        yield f"{name}down", model.hidden, inner, layers


def _layer_norm(place: Place, tokens: int, hidden: int) -> tuple[Any, ...]:
    return place.normal(tokens, hidden), place.normal(hidden), place.normal(hidden), 1e-5


def _expert_calls(model: Dimensions) -> Iterator[Call]:
    experts, topk, times = model.experts, model.topk, model.expert_layers
    if model.groups:
        yield Call("grouped_topk", "", times, _wide(shapes.route_in_groups, experts), experts)
    else:
        name = "topk_sigmoid" if model.sigmoid else "topk_softmax"
        yield Call(name, "", times, lambda place, n: (place.normal(n, experts), topk, True), experts)
    op_name, mixture = _mixture(model)
    yield Call(op_name, "", times, _wide(mixture, model.hidden), model.hidden)
    yield Call("moe_align_block_size", "", times, _wide(shapes.align(topk), experts), experts)
    yield Call("moe_sum", "", times, lambda place, n: (place.normal(n, topk, model.hidden),), model.hidden)


def _mixture(model: Dimensions) -> tuple[str, shapes.Make]:
    sizes, weights = (model.experts, model.topk, model.expert_inner), model.weights
    if weights is None:
        return "fused_moe", shapes.mix(*sizes)
    if weights.inputs:
        return weights.expert_operator, shapes.mix_scaled(*sizes, weights.kind, weights.block)
    weights = weights.of_rows(model.hidden).of_rows(model.expert_inner)
    return weights.expert_operator, shapes.mix_weight_only(*sizes, weights.kind, weights.group, weights.zeros)


def attention_calls(model: Dimensions, requests: int, new: int, context: int) -> Call:
    """Return attention of requests with ``new`` new tokens each, the last of ``context``."""
    if model.latent_rank and new == 1:
        decode = shapes.latent(model.heads)
        return Call("mla_decode", "", model.layers, lambda place, n: decode(place, n, context), context)
    if model.latent_rank:
        full = partial(shapes.attend_in_full, heads=model.heads)
        return Call("mla_prefill", "", model.layers, lambda place, n: full(place, requests, new), context)
    attend = partial(shapes.attend, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim)
    return Call("paged_attention", "", model.layers, lambda place, n: attend(place, requests, new, context), context)


def tuned_cases(
    model: Dimensions,
    place: Place,
    batches: Sequence[int],
    prefills: Sequence[int],
    contexts: Sequence[int],
    accelerator: bool,
    op_names: Sequence[str] = (),
) -> list[TunedCase]:
    """List every shape to measure: row-wise operators at all sizes, attention for decode and for prefill.

    Args:
        model, place: the model, and the place of its calls.
        batches: tokens of the decoding steps that graphs are captured for.
        prefills: tokens of steps that read prompts; one prompt each.
        contexts: keys of decoding requests, up to :data:`MOST_CACHED` for all of them together.
        accelerator: whether the place is an accelerator.
        op_names: only these operators; all if empty.
    """
    found: list[TunedCase] = []

    def add(call_of: Callable[[int], Call], tokens: int) -> None:
        call, nowhere = call_of(tokens), Place(place.dtype, torch.device("meta"))
        if op_names and call.op_name not in op_names:
            return
        operator = OPERATORS[call.op_name]
        dtype = str(place.dtype).removeprefix("torch.")

        def at(step: int) -> Case:
            other = call_of(step)
            make, plan = (partial(other.make, where, step) for where in (place, nowhere))
            seen = operator.workload(*operator.bind(plan(), {}))
            return Case(other.op_name, other.label, seen.tokens, other.width, make, plan)

        case = at(tokens)
        assert case.plan is not None
        key = Key(call.op_name, dtype, case.tokens, operator.workload(*operator.bind(case.plan(), {})).phase)
        found.append(TunedCase(key, case, call.times, tokens, at))

    for call in row_calls(model):
        for tokens in (*batches, *prefills):
            add(lambda _, own=call: own, tokens)  # type: ignore[misc]
    for batch in batches:
        fitting = [keys for keys in contexts if batch * keys <= MOST_CACHED[accelerator]]
        for keys in fitting or [max(16, MOST_CACHED[accelerator] // batch)]:
            add(lambda requests, own=keys: attention_calls(model, requests, 1, own), batch)  # type: ignore[misc]
    for tokens in prefills:
        add(lambda new: attention_calls(model, 1, new, new), tokens)
    return found
