"""Perplexity of a text: one number for an engine's accuracy on a model, with any implementations.

A text is split into rows that do not overlap. Each row begins with the model's beginning-of-text token, so it is a
separate request, and each of its other tokens counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import DispatchError

TOLERANCE = {"float32": 2e-5, "float16": 3e-4, "bfloat16": 1e-3}
"""Dtype → the largest relative difference from the perplexity in float32 that rounding explains."""


@dataclass(frozen=True)
class Perplexity:
    """An engine's judgement of a text.

    Args:
        tokens: number of scored tokens.
        nats: the mean of their negative log-probabilities.
        bytes: length of their text, in bytes.
    """

    tokens: int
    nats: float
    bytes: int

    @property
    def value(self) -> float:
        """Return the perplexity: the number of equally likely tokens with the same uncertainty."""
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        """Return bits per byte of text, comparable between models with different tokenizers."""
        return self.nats * self.tokens / self.bytes / math.log(2)

    def as_data(self) -> dict[str, Any]:
        """Return plain data for programs."""
        return {**asdict(self), "perplexity": self.value, "bits_per_byte": self.bits_per_byte}


def rows_of(tokens: Sequence[int], beginning: int | None, window: int) -> list[list[int]]:
    """Split a text's tokens into rows of at most ``window`` tokens, each after the beginning-of-text token.

    A model without such a token gets rows with an unscored first token of the text.

    Raises:
        DispatchError: there is nothing to score.
    """
    first = [] if beginning is None else [beginning]
    cut = [[*first, *tokens[start : start + window]] for start in range(0, len(tokens), window)]
    rows = [row for row in cut if len(row) > 1]
    if not rows:
        raise DispatchError("the text has fewer than two tokens, so there is nothing to score")
    return rows


def perplexity(scores: Sequence[Sequence[float]], size: int) -> Perplexity:
    """Compute the perplexity of a text from the log-probabilities of its tokens and its size in bytes.

    Each row holds the log-probabilities of its tokens except the first.

    Raises:
        DispatchError: a log-probability is not a number, or a token is impossible.
    """
    values = [score for row in scores for score in row]
    if not all(map(math.isfinite, values)):
        raise DispatchError("an engine gave a token the log-probability NaN or infinity: the model's numbers overflow")
    return Perplexity(len(values), -math.fsum(values) / len(values), size)


def relative_difference(found: float, expected: float) -> float:
    """Return the distance of one perplexity from another, as a share of the latter."""
    return abs(found - expected) / expected
