"""Batch invariance: whether an implementation gives a row the same bits in every batch. One case per operator.

``python invariance.py IDS DTYPES`` prints the differences, in a process that interprets Triton.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from fl_dispatch import OpImpl, get_default_manager
from fl_dispatch.ops import OPERATORS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 70
"""More rows than two tiles of any product."""
SIZES = (1, 2, 3, 5, 8, 17, 33, 64)
"""Rows of the smaller batches."""

PROMPTS = [random.Random(length).choices(range(5, 400), k=length) for length in (1, 5, 17, 33, 64, 90, 150, 203)]
"""Prompts for ``tests/vllm/run_invariant.py``."""

Arguments = dict[str, Any]
Batch = tuple[str, Arguments]


class Draw:
    """Random tensors of a dtype on a device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device, dtype)


@dataclass(frozen=True)
class Rows:
    """An operator with rows of results that belong to rows of some arguments.

    Args:
        batches: makes batches of ``ROWS`` rows.
        by_row: the names of these arguments.
    """

    batches: Callable[[Draw], Iterator[Batch]]
    by_row: tuple[str, ...]

    def differences(self, function: Callable[..., Any], draw: Draw) -> Iterator[str]:
        """Yield in words the batches with rows that differ from those in the largest batch."""
        for label, arguments in self.batches(draw):
            whole = _tensors(function(**_copied(arguments)))
            for size in SIZES:
                chosen = torch.randperm(ROWS, generator=draw.generator)[:size].to(draw.device)
                given = [name for name in self.by_row if arguments.get(name) is not None]
                part = {**arguments, **{name: arguments[name][chosen] for name in given}}
                for found, wanted in zip(_tensors(function(**_copied(part))), whole, strict=True):
                    wrong = int((~_same(found, wanted[chosen])).flatten(1).any(1).sum())
                    if wrong:
                        yield f"{label}: {wrong} of {size} rows"


def _copied(arguments: Arguments) -> Arguments:
    """Return the arguments with copies of the tensors of rows that the operator may overwrite."""
    owned = {name: arguments[name] for name in ("x", "residual") if arguments.get(name) is not None}
    return {**arguments, **{name: value.clone() for name, value in owned.items()}}


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]


def _same(found: Tensor, wanted: Tensor) -> Tensor:
    """Return for each element whether its bits are equal, except for the sign of a zero."""
    return (found == wanted) | (found.isnan() & wanted.isnan())


# -- rows -------------------------------------------------------------------------------------------------------------


def _linear(draw: Draw) -> Iterator[Batch]:
    for inner, columns in ((64, 48), (896, 130), (1024, 8), (200, 4), (513, 3), (2304, 64)):
        weight, bias = draw.normal(columns, inner, scale=0.05), draw.normal(columns)
        given = {"x": draw.normal(ROWS, inner), "weight": weight}
        yield f"{inner} to {columns}", {**given, "bias": None}
        yield f"{inner} to {columns}, bias", {**given, "bias": bias}


def _gated(draw: Draw) -> Iterator[Batch]:
    for width in (20, 100, 1000, 4096):
        yield f"{width} columns", {"x": draw.normal(ROWS, 2 * width, scale=3.0)}


def _gelus(draw: Draw) -> Iterator[Batch]:
    for label, arguments in _gated(draw):
        for approximate in ("none", "tanh"):
            yield f"{label}, {approximate}", {**arguments, "approximate": approximate}


def _norms(draw: Draw) -> Iterator[Batch]:
    for hidden in (64, 100, 896, 4096):
        x, weight = draw.normal(ROWS, hidden), draw.normal(hidden)
        yield f"{hidden} columns", {"x": x, "residual": None, "weight": weight}
        yield f"{hidden} columns, residual", {"x": x, "residual": draw.normal(ROWS, hidden), "weight": weight}
    yield "heads", {"x": draw.normal(ROWS, 4, 128), "residual": None, "weight": draw.normal(128)}


def _layer_norms(draw: Draw) -> Iterator[Batch]:
    for hidden in (64, 100, 4096):
        yield f"{hidden} columns", {"x": draw.normal(ROWS, hidden), "weight": draw.normal(hidden), "bias": None}


def _rotary(draw: Draw) -> Iterator[Batch]:
    for dim in (20, 64, 128):
        given = {"query": draw.normal(ROWS, 6, dim), "key": draw.normal(ROWS, 2, dim), "inplace": False}
        angle = draw.normal(100, dim // 2, dtype=torch.float32)
        given |= {"cos": angle.cos(), "sin": angle.sin(), "position_ids": draw.integers(100, ROWS)}
        yield f"heads of {dim}", given


def _routing(draw: Draw, **options: Any) -> Iterator[Batch]:
    for experts in (8, 20):
        logits, bias = draw.normal(ROWS, experts), draw.normal(experts, dtype=torch.float32)
        given = {"router_logits": logits, "topk": 3, **options}
        yield f"{experts} experts", given
        yield f"{experts} experts, bias, renormalized", {**given, "bias": bias, "renormalize": True}


def _grouped(draw: Draw) -> Iterator[Batch]:
    for scoring in ("softmax", "sigmoid"):
        for label, given in _routing(draw, num_expert_group=4, topk_group=2, scoring_func=scoring):
            yield f"{scoring}, {label}", given


def _mixtures(draw: Draw) -> Iterator[Batch]:
    for activation, experts, hidden, inner in (
        ("silu", 8, 96, 64),
        ("gelu", 4, 64, 40),
        ("gelu_tanh", 300, 48, 32),
        ("silu_no_mul", 8, 64, 48),
    ):
        rows = inner if activation.endswith("no_mul") else 2 * inner
        ids = torch.stack([torch.randperm(experts, generator=draw.generator)[:3] for _ in range(ROWS)])
        yield (
            f"{activation}, {experts} experts",
            {
                "hidden_states": draw.normal(ROWS, hidden),
                "w13": draw.normal(experts, rows, hidden, scale=0.1),
                "w2": draw.normal(experts, hidden, inner, scale=0.1),
                "topk_weights": draw.normal(ROWS, 3, dtype=torch.float32).abs(),
                "topk_ids": ids.to(draw.device, torch.int32),
                "activation": activation,
            },
        )


# -- a paged cache ----------------------------------------------------------------------------------------------------


class Writes:
    """New keys and values, written to separate slots."""

    def differences(self, function: Callable[..., Any], draw: Draw) -> Iterator[str]:
        """Yield in words the batches with slots that differ from those in the largest batch."""
        key, value = draw.normal(ROWS, 2, 64), draw.normal(ROWS, 2, 48)
        slots = torch.randperm(128, generator=draw.generator)[:ROWS].to(draw.device)

        def written(chosen: Tensor) -> list[Tensor]:
            caches = [draw.normal(8, 16, *new.shape[1:]).zero_() for new in (key, value)]
            function(key[chosen], value[chosen], *caches, slots[chosen])
            return [cache.flatten(0, 1)[slots[chosen]] for cache in caches]

        whole = written(torch.arange(ROWS, device=draw.device))
        for size in SIZES:
            chosen = torch.randperm(ROWS, generator=draw.generator)[:size].to(draw.device)
            if not all(
                torch.equal(found, wanted[chosen]) for found, wanted in zip(written(chosen), whole, strict=True)
            ):
                yield f"{size} rows"


class RotatedWrites:
    """New queries, keys and values; keys and values are written to separate slots."""

    def differences(self, function: Callable[..., Any], draw: Draw) -> Iterator[str]:
        """Yield in words the batches with rows or slots that differ from those in the largest batch."""
        (_, given), *_ = _rotary(draw)
        value = draw.normal(ROWS, *given["key"].shape[1:])
        slots = torch.randperm(128, generator=draw.generator)[:ROWS].to(draw.device)

        def written(chosen: Tensor) -> list[Tensor]:
            rows = [given["query"][chosen], given["key"][chosen], value[chosen]]
            caches = [draw.normal(8, 16, *value.shape[1:]).zero_() for _ in range(2)]
            tables = (given["cos"], given["sin"], given["position_ids"][chosen])
            rotated = function(*rows, *tables, *caches, slots[chosen])
            return [*rotated, *(cache.flatten(0, 1)[slots[chosen]] for cache in caches)]

        whole = written(torch.arange(ROWS, device=draw.device))
        for size in SIZES:
            chosen = torch.randperm(ROWS, generator=draw.generator)[:size].to(draw.device)
            pairs = zip(written(chosen), whole, strict=True)
            if not all(bool(_same(found, wanted[chosen]).all()) for found, wanted in pairs):
                yield f"{size} rows"


@dataclass(frozen=True)
class Attention:
    """Requests over a paged cache: alone and together, with whole prompts, chunks, and single tokens.

    Args:
        options: of the operator.
    """

    lengths: tuple[int, ...] = (1, 7, 40, 129, 300)

    def differences(self, function: Callable[..., Any], draw: Draw) -> Iterator[str]:
        """Yield in words the batches with queries that differ from those in separate prompts."""
        variants: dict[str, tuple[tuple[int, int, int], Arguments]] = {
            "plain": ((4, 2, 64), {}),
            "one head for each": ((3, 3, 80), {}),
            "window": ((4, 2, 32), {"sliding_window": 37}),
            "capped": ((4, 1, 32), {"softcap": 20.0}),
            "slopes": ((4, 2, 32), {"alibi_slopes": draw.normal(4, dtype=torch.float32).abs()}),
            "sinks": ((4, 2, 32), {"sinks": draw.normal(4)}),
        }
        for label, ((heads, kv_heads, dim), options) in variants.items():
            blocks = [-(-length // 16) for length in self.lengths]
            pages = torch.randperm(sum(blocks), generator=draw.generator).to(draw.device, torch.int32)
            tables, caches = pages.split(blocks), [draw.normal(sum(blocks), 16, kv_heads, dim) for _ in range(2)]
            queries = [draw.normal(length, heads, dim) for length in self.lengths]

            def attend(
                *parts: tuple[int, int, int],
                queries: Sequence[Tensor] = queries,
                tables: Sequence[Tensor] = tables,
                caches: Sequence[Tensor] = caches,
                options: Arguments = options,
            ) -> list[Tensor]:
                return _attended(function, parts, queries, tables, caches, options)

            alone = [attend((request, 0, length))[0] for request, length in enumerate(self.lengths)]
            for how, parts in _batches(self.lengths, draw):
                for (request, begin, end), found in zip(parts, attend(*parts), strict=True):
                    if not bool(_same(found, alone[request][begin:end]).all()):
                        yield f"{label}, {how}: tokens {begin} to {end} of {self.lengths[request]}"


def _batches(lengths: Sequence[int], draw: Draw) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
    """Yield batches of parts of requests: the request, its first new token, and the end of the new tokens."""
    requests = torch.randperm(len(lengths), generator=draw.generator).tolist()
    yield "together", [(each, 0, lengths[each]) for each in requests]
    yield "decode together", [(each, lengths[each] - 1, lengths[each]) for each in requests]
    for each in requests:
        yield "decode alone", [(each, lengths[each] - 1, lengths[each])]
    cuts = [int(draw.integers(length, 1)) for length in lengths]
    yield "first chunks", [(each, 0, max(1, cuts[each])) for each in requests]
    yield "last chunks", [(each, cuts[each], lengths[each]) for each in requests]
    yield (
        "prompts and decode",
        [(each, lengths[each] - 1 if place % 2 else 0, lengths[each]) for place, each in enumerate(requests)],
    )
    longest = max(range(len(lengths)), key=lambda each: lengths[each])
    for new in (1, 3, 9, 64):
        yield f"chunks of {new}", [(longest, lengths[longest] // 2, lengths[longest] // 2 + new)]


def _attended(
    function: Callable[..., Any],
    parts: Sequence[tuple[int, int, int]],
    queries: Sequence[Tensor],
    tables: Sequence[Tensor],
    caches: Sequence[Tensor],
    options: Arguments,
) -> list[Tensor]:
    device = caches[0].device
    new, lengths = [end - begin for _, begin, end in parts], [end for *_, end in parts]
    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    table = torch.zeros(len(parts), -(-max(lengths) // 16), dtype=torch.int32, device=device)
    for row, (request, _, end) in enumerate(parts):
        held = -(-end // 16)
        table[row, :held] = tables[request][:held]
    query = torch.cat([queries[request][begin:end] for request, begin, end in parts])
    starts = integers([0, *torch.tensor(new).cumsum(0).tolist()])
    scale = query.shape[-1] ** -0.5
    out = function(query, *caches, table, starts, integers(lengths), max(new), max(lengths), scale, **options)
    return list(out.split(new))


CASES: Mapping[str, Rows | Writes | RotatedWrites | Attention] = {
    "linear": Rows(_linear, ("x",)),
    "silu_and_mul": Rows(_gated, ("x",)),
    "gelu_and_mul": Rows(_gelus, ("x",)),
    "rms_norm": Rows(_norms, ("x", "residual")),
    "gemma_rms_norm": Rows(_norms, ("x", "residual")),
    "layer_norm": Rows(_layer_norms, ("x",)),
    "rotary_embedding": Rows(_rotary, ("query", "key", "position_ids")),
    "topk_softmax": Rows(_routing, ("router_logits",)),
    "topk_sigmoid": Rows(_routing, ("router_logits",)),
    "grouped_topk": Rows(_grouped, ("router_logits",)),
    "fused_moe": Rows(_mixtures, ("hidden_states", "topk_weights", "topk_ids")),
    "kv_cache_write": Writes(),
    "rotary_embedding_kv_cache_write": RotatedWrites(),
    "paged_attention": Attention(),
}
"""A case for each operator with implementations that may be declared batch-invariant."""


def implementations(op_name: str) -> list[OpImpl]:
    """Return all implementations of an operator."""
    manager = get_default_manager()
    manager.ensure_initialized()
    return manager.registry.get_implementations(op_name)


def declared(*impl_ids: str) -> list[OpImpl]:
    """Return the implementations declared batch-invariant, with these ids if any are given."""
    found = [impl for name in sorted(OPERATORS) for impl in implementations(name)]
    wanted = [impl for impl in found if impl.properties.get("batch_invariant")]
    return [impl for impl in wanted if not impl_ids or impl.impl_id in impl_ids]


def differences(impl: OpImpl, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return all differences between batches, in words."""
    return list(CASES[impl.op_name].differences(impl.fn, Draw(dtype, device)))


def different(ways: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the parts of ``run_invariant``'s answers that differ from those to the prompt alone, and where first."""
    wrong = []
    for way, answers in ways.items():
        alone = ways["scored alone" if way.startswith("scored") else "alone"]
        for place, answer in answers.items():
            for part, values in answer.items():
                if values != alone[place][part]:
                    pairs = zip(values, alone[place][part], strict=False)
                    first = next((index for index, (left, right) in enumerate(pairs) if left != right), "at the end")
                    wrong.append(f"{way}: prompt {place}, {part} {first}")
    return wrong


def _add_in_order() -> None:
    """Make the interpreter's products add in order, because NumPy's depend on the memory layout of the operands."""

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        left, right = (part.astype(dtype or part.dtype) for part in (a, b))
        return (left[..., :, :, None] * right[..., None, :, :]).sum(axis=-2)

    numpy.matmul = matmul  # type: ignore[assignment]


if __name__ == "__main__":
    from interpreting import quicken

    quicken()
    _add_in_order()
    ROWS, SIZES = 36, (1, 5)  # interpreted, each program takes a millisecond
    ids, dtypes = (argument.split(",") for argument in sys.argv[1:3])
    found = {
        f"{impl.op_name} {impl.impl_id} {dtype}": differences(impl, getattr(torch, dtype), torch.device("cpu"))
        for impl in declared(*ids)
        for dtype in dtypes
    }
    print(json.dumps(found))
