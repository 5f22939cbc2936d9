"""The rules for every engine with a quantized checkpoint, whichever host serves it and whatever is quantized.

A test file has its engines, a fixture ``compared`` made by :func:`comparisons`, and a subclass of :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_dispatch.cli import small_model
from quantized_checkpoints import SCHEMES, Scheme
from quantized_network import Comparison
from running import MAX_TOKENS, PROMPTS


@dataclass(frozen=True, eq=False)
class Run:
    """An engine with a checkpoint; ``engine``: further arguments of the host's."""

    scheme: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "one rank"

    @property
    def made(self) -> Scheme:
        return SCHEMES[self.scheme]

    @property
    def ranks(self) -> int:
        return int(self.engine.get("tensor_parallel_size", self.engine.get("tp_size", 1)))

    def __str__(self) -> str:
        return f"{self.scheme}, {self.kind}"


def comparisons(
    answered: Callable[[Run], tuple[Sequence[Sequence[int]], Tensor]], model: Path = small_model.CHECKPOINT
) -> Callable[[Run], Comparison]:
    """Each run beside the network that its checkpoint of a model stands for; ``answered``: its texts and scores."""
    return cache(lambda run: Comparison.of(*answered(run), run.made, run.ranks, model))


class Rules:
    """Subclasses have ``run`` parametrized."""

    def test_it_computes_what_the_dequantized_network_does(
        self, run: Run, compared: Callable[[Run], Comparison]
    ) -> None:
        assert compared(run).agrees

    def test_its_tokens_are_the_networks_where_rounding_does_not_decide(
        self, run: Run, compared: Callable[[Run], Comparison]
    ) -> None:
        assert compared(run).right.decides(PROMPTS, MAX_TOKENS)
