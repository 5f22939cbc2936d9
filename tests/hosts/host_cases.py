"""The same calls for both hosts' layers: what a host's script gives, and which tensors go through it.

A host's script is ``python layers_of_HOST.py tensors.pt results.pt``. It makes a :class:`Layers` of that host's real
classes through its plugin, and hands it to :func:`run`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import shared_backend
import torch
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, POSITIONS = 64, 4, 2, 16, 128
EXPERTS, TOPK, INNER = 8, 2, 48
PAGE, REQUESTS = 16, (19, 1, 33)  # tokens of each request
WINDOW, SOFT_CAP, EPSILON = 8, 5.0, 1e-5


@dataclass(frozen=True)
class Layers:
    """One host's layers. Norms have the weight that is given, and ``attend`` stores before it attends.

    Args:
        silu, gelu: on ``[tokens, 2 * HIDDEN]``; the second in its tanh form.
        norm, gemma_norm: weight → layer, which takes a residual or none.
        rotary: (rotary_dim, neox style) → layer on positions, flat query and flat key.
        attend: (window, soft cap) → a function of each request's length, and of query, key and value of the batch: all
            tokens of each request first, then one more of each, whose tensors follow. Both outputs.
        route: logits → weights and expert numbers, renormalized.
        experts: tokens, w13, w2, weights, numbers → tokens.
    """

    silu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Callable[..., Any]]
    gemma_norm: Callable[[Tensor], Callable[..., Any]]
    rotary: Callable[[int, bool], Callable[..., Any]]
    attend: Callable[[int | None, float], Callable[..., list[Tensor]]]
    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]


def make_tensors() -> dict[str, Tensor]:
    """Everything that goes into a layer."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, more = sum(REQUESTS), len(REQUESTS)
    return {
        "gated": normal(tokens, 2 * HIDDEN),
        "x": normal(tokens, HIDDEN),
        "residual": normal(tokens, HIDDEN),
        "weight": normal(HIDDEN),
        "positions": torch.randint(0, POSITIONS, (tokens,), generator=generator),
        "query": normal(tokens + more, HEADS * HEAD_SIZE),
        "key": normal(tokens + more, KV_HEADS * HEAD_SIZE),
        "value": normal(tokens + more, KV_HEADS * HEAD_SIZE),
        "logits": normal(tokens, EXPERTS),
        "w13": normal(EXPERTS, 2 * INNER, HIDDEN) / 8,
        "w2": normal(EXPERTS, HIDDEN, INNER) / 8,
    }


def pages() -> list[list[int]]:
    """The pages of each request: none beside another of its own, and page 0 is nobody's."""
    each = [-(-(length + 1) // PAGE) for length in REQUESTS]
    numbers = iter(range(sum(each), 0, -1))
    return [[next(numbers) for _ in range(count)] for count in each]


def slots(request: int, first: int, last: int) -> list[int]:
    """The slots of some tokens of a request."""
    own = pages()[request]
    return [own[token // PAGE] * PAGE + token % PAGE for token in range(first, last)]


def calls(layers: Layers, given: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """Label → the call; the label begins with the operator."""

    def of(*names: str) -> list[Tensor]:
        return [given[name].clone() for name in names]

    def rotate(size: int, neox: bool) -> Any:
        tokens = len(given["positions"])
        query, key = (tensor[:tokens].contiguous() for tensor in of("query", "key"))
        return layers.rotary(size, neox)(given["positions"], query, key)

    def experts() -> Tensor:
        weights, ids = given["logits"].softmax(-1).topk(TOPK)
        return layers.experts(*of("x", "w13", "w2"), weights, ids.int())

    return {
        "silu_and_mul": lambda: layers.silu(*of("gated")),
        "gelu_and_mul": lambda: layers.gelu(*of("gated")),
        "rms_norm": lambda: layers.norm(given["weight"])(*of("x")),
        "rms_norm with residual": lambda: layers.norm(given["weight"])(*of("x", "residual")),
        "gemma_rms_norm": lambda: layers.gemma_norm(given["weight"])(*of("x")),
        "gemma_rms_norm with residual": lambda: layers.gemma_norm(given["weight"])(*of("x", "residual")),
        "rotary_embedding": lambda: rotate(HEAD_SIZE, True),
        "rotary_embedding, neighbours": lambda: rotate(HEAD_SIZE, False),
        "rotary_embedding, half": lambda: rotate(HEAD_SIZE // 2, True),
        "paged_attention": lambda: layers.attend(None, 0.0)(*of("query", "key", "value")),
        "paged_attention with a window": lambda: layers.attend(WINDOW, 0.0)(*of("query", "key", "value")),
        "paged_attention with a soft cap": lambda: layers.attend(None, SOFT_CAP)(*of("query", "key", "value")),
        "topk_softmax": lambda: layers.route(given["logits"]),
        "fused_moe": experts,
    }


def run(layers: Layers) -> None:
    """Make every call; write label → results, and label → calls of the backend's methods."""
    results, counts = {}, {}
    with torch.no_grad():
        for label, call in calls(layers, torch.load(sys.argv[1])).items():
            shared_backend.calls.clear()
            found = call()
            results[label] = [found] if isinstance(found, Tensor) else list(found)
            counts[label] = dict(shared_backend.calls)
    torch.save({"results": results, "calls": counts}, sys.argv[2])
