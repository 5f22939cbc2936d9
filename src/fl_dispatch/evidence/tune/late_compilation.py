"""Find kernels that an implementation compiles or tunes after the start, for sizes that a request may have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...errors import text_of
from ...hosting.start.warm_batches import DECODE_KEYS, REQUESTS, attention_batches, token_counts
from ...ops import Place
from ...ops.inputs import shapes
from .calls import TunedCase, attention_calls, row_calls
from .model import Dimensions

BETWEEN = (3, 7, 24, 100, 200, 777, 1000, 3001, 5000)
"""Numbers of tokens that are not powers of two, as in requests."""
LENGTHS = (77, 1500)
"""Keys of requests that the start did not run."""

Make = Callable[[], tuple[Any, ...]]


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of kernels that Triton compiles or tunes in this block."""
    found: list[str] = []
    try:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner
    except ImportError:  # no kernels are compiled here
        yield found
        return
    before, bench = knobs.runtime.jit_post_compile_hook, Autotuner._bench

    def compiled(*args: Any, **kwargs: Any) -> Any:
        found.append(str(getattr(kwargs.get("fn"), "name", kwargs.get("repr", "a kernel"))))
        return before(*args, **kwargs) if before is not None else None

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(f"{getattr(self.base_fn, '__name__', 'a kernel')} (tuned)")
        return bench(self, *args, **kwargs)

    knobs.runtime.jit_post_compile_hook, Autotuner._bench = compiled, tuned
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook, Autotuner._bench = before, bench


def late_compilation(function: Callable[..., Any], start: Iterator[Make], requests: Iterator[tuple[str, Make]]) -> str:
    """Return in words the first kernel that an implementation compiles after a start; empty if there is none.

    Args:
        function: the implementation. Calls that it declines or fails on are not counted here.
        start: the calls of the start.
        requests: calls after the start, by name.
    """
    for make in start:
        _call(function, make)
    with compilations() as found:
        for name, make in requests:
            why = _call(function, make)
            if found and not why:
                return f"after the start it compiles {found[0]} for {name}"
    return ""


def _call(function: Callable[..., Any], make: Make) -> str:
    try:
        function(*make())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # foreign code: its failure is found in verification
        return text_of(error)
    return ""


def start_of(model: Dimensions, op_name: str, place: Place, sizes: list[int], most_requests: int) -> Iterator[Make]:
    """Yield the calls of an operator that an engine's start makes.

    Args:
        model, place: the model, and the place of its calls.
        op_name: the operator.
        sizes: tokens of the steps that are captured or tuned; the largest is the largest step.
        most_requests: largest number of requests of a batch.
    """
    for call in row_calls(model):
        if call.op_name == op_name:
            yield from (partial(call.make, place, n) for n in sorted({*token_counts(max(sizes)), *sizes}))
    if op_name == "paged_attention":
        for queries, longest in attention_batches(max(sizes), most_requests, max(DECODE_KEYS)):
            yield partial(shapes.attend_batch, place, queries, longest, model.heads, model.kv_heads, model.head_dim)
    if op_name in ("mla_decode", "mla_prefill"):
        for requests in (one for one in REQUESTS if one <= most_requests):
            for longest in DECODE_KEYS:
                new = 1 if op_name == "mla_decode" else min(longest, max(sizes) // requests)
                yield partial(attention_calls(model, requests, new, longest).make, place, requests)


def requests_of(
    model: Dimensions, op_name: str, place: Place, sizes: list[int], cases: list[TunedCase]
) -> Iterator[tuple[str, Make]]:
    """Yield calls after the start: the tuned ones, and others of sizes between."""
    for call in row_calls(model):
        if call.op_name == op_name:
            between = (n for n in BETWEEN if n < max(sizes))
            yield from ((f"{n} tokens", partial(call.make, place, n)) for n in between)
    for tuned in cases:
        if tuned.key.op_name == op_name:
            yield str(tuned.key), tuned.case.make
    if op_name == "paged_attention":
        for length in LENGTHS:
            for queries in ((1, 1, 1), (min(length, max(sizes)),), (1, 1, min(50, max(sizes)))):
                make = partial(shapes.attend_batch, place, queries, length, model.heads, model.kv_heads, model.head_dim)
                yield f"requests of {queries} tokens and {length} keys", make
