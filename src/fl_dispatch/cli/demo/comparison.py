"""Comparison with Hugging Face: the same tokens, or in half precision log-probabilities as near to float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..half_precision import COMPARED, EXPERTS, LARGEST, MEAN, distances, exact, table
from ..network import network
from .engines import Generated, Request

if TYPE_CHECKING:
    from torch import Tensor

TIE = 1e-3
"""Largest difference in nats of two choices that rounding in float32 may swap."""


def compare(family: str, request: Request, generated: Generated) -> tuple[bool, str]:
    """Return whether an engine's result is right, and the compared values in words."""
    return _by_scores(family, request, generated) if request.scored else _by_tokens(request, generated)


def _by_tokens(request: Request, generated: Generated) -> tuple[bool, str]:
    """Check that each token is the first choice of Hugging Face's model after the tokens before it.

    Then greedy texts are equal. Rounding decides between two choices with nearly equal scores, so both are right.
    """
    import torch

    expected = exact(network(request.model, torch.float32), generated.sequences)[0]
    ties = 0
    for scores, tokens in _rows(generated, expected):
        behind = scores.amax(dim=-1) - scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        if behind.max() > TIE:
            return False, "tokens equal to Hugging Face's: NO"
        ties += int((behind > 0).sum())
    but = f", but for {ties} where its two first choices are within {TIE:g}" if ties else ""
    return True, f"tokens equal to Hugging Face's: yes{but}"


def _by_scores(family: str, request: Request, generated: Generated) -> tuple[bool, str]:
    """Compare log-probabilities after every token, because half precision may change a close choice."""
    import torch

    single, half = (
        exact(network(request.model, dtype), generated.sequences)[0]
        for dtype in (torch.float32, getattr(torch, request.dtype))
    )
    compared = COMPARED if family in EXPERTS else 1.0
    mean, largest = distances(table(generated.rows, request.vocabulary), single, half, compared)
    right = mean <= MEAN and largest <= LARGEST
    same, total = _first_choices(generated, single)
    return right, (
        f"{same} of {total} tokens are Hugging Face's in float32, and "
        f"log-probabilities as near to float32 as Hugging Face's {request.dtype}: {'yes' if right else 'NO'} "
        f"(mean difference {mean:.2f} of its, at most {MEAN}; largest {largest:.2f}, at most {LARGEST})"
    )


def _first_choices(generated: Generated, single: Tensor) -> tuple[int, int]:
    """Count the generated tokens that are a model's first choice after the tokens before them, and all tokens.

    Args:
        generated: an engine's result.
        single: the model's log-probabilities after every token but the last of each sequence.
    """
    same = sum(
        ours == theirs
        for scores, tokens in _rows(generated, single)
        for ours, theirs in zip(tokens, scores.argmax(dim=-1).tolist(), strict=True)
    )
    return same, sum(map(len, generated.tokens))


def _rows(generated: Generated, expected: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield for each prompt a model's log-probabilities at the generated tokens, and these tokens."""
    import torch

    parts = torch.split(expected, [len(sequence) - 1 for sequence in generated.sequences])
    for part, tokens in zip(parts, generated.tokens, strict=True):
        yield part[-len(tokens) :], tokens
