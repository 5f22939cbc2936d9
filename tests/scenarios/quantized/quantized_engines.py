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
from fl_dispatch.cli.checkpoints import build_checkpoint
from quantized_checkpoints import SCHEMES, Scheme
from quantized_network import UNIT, Comparison
from running import MAX_TOKENS, PROMPTS

FAMILIES = (
    "compressed-tensors W8A8 int8",
    "compressed-tensors W8A8 fp8",
    "compressed-tensors W4A16, zero points",
    "fp8, blocks of 128",
    "gptq",
    "awq",
)
"""One scheme of each kind of weights, which draws of further kinds of engines are from."""


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


def divisible(folder: Path) -> Path:
    """A dense model of random weights whose products two ranks divide into whole blocks of 128."""
    heads = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    return build_checkpoint("llama", folder, **heads, **sizes)


def comparisons(
    answered: Callable[[Run], tuple[Sequence[Sequence[int]], Tensor]],
    model: Path = small_model.CHECKPOINT,
    unit: float = UNIT,
    absorbed: bool = False,
) -> Callable[[Run], Comparison]:
    """Each run beside the network that its checkpoint of a model stands for.

    Args:
        answered: its texts and scores.
        model: the checkpoint, not quantized.
        unit: the rounding of a sum on its device.
        absorbed: whether latent attention is, for prompts too.
    """
    return cache(lambda run: Comparison.of(*answered(run), run.made, run.ranks, model, unit, absorbed))


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
