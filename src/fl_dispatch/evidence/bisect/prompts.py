"""The requests of one run: prompts with every token given, so that one difference does not cause others.

The last tokens of each prompt are forced, one per step, so that decoding steps are compared as well. Round ``batch``
has all prompts at once, together more than 256 tokens; ``alone`` each prompt separately in reverse order; ``cached``
all of them again, answered from the host's prefix cache if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FORCED = 8
"""Forced tokens of each prompt, one per step."""
LENGTHS = (7, 33, 120, 290, 2)
"""Tokens of the generated prompts."""
TOP = 64
"""Requested tokens of each row."""


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        label: the round and the number of the prompt.
        prompt: its tokens.
        forced: the tokens that follow, one a step.
        prefill: whether rows of the prompt are requested, too; a host then does not use its prefix cache.
    """

    label: str
    prompt: list[int]
    forced: list[int]
    prefill: bool = True

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"label": self.label, "prompt": self.prompt, "forced": self.forced, "prefill": self.prefill}


def generated(vocabulary: int, longest: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Return prompts of several lengths for any vocabulary.

    Args:
        vocabulary: token ids are below it; the first ones, which mostly control, do not occur.
        longest: largest number of tokens of a prompt that the model takes.
    """
    first = min(5, vocabulary // 2)
    return [
        [(row * 7919 + column * (row + 3) * 101 + column * column * 17) % (vocabulary - first) + first
         for column in range(min(length, longest))]
        for row, length in enumerate(lengths)
    ]  # fmt: skip


def rounds(prompts: Sequence[Sequence[int]], forced: int = FORCED) -> list[list[Request]]:
    """Return the requests of one run, round by round; those of a round are sent at once."""

    def request(name: str, number: int, prefill: bool) -> Request:
        tokens = list(prompts[number])
        keep = max(1, len(tokens) - forced)
        return Request(f"{name} {number}", tokens[:keep], tokens[keep:], prefill)

    every = range(len(prompts))
    alone = [[request("alone", number, True)] for number in reversed(every)]
    again = [request("cached", number, False) for number in every if len(prompts[number]) > 1]
    return [[request("batch", number, True) for number in every], *alone, *([again] if again else [])]


def other_composition(label: str) -> str:
    """Return the label of the same rows in another composition of the batch, or an empty string."""
    name, _, number = label.partition(" ")
    return f"batch {number}" if name == "alone" else ""
