"""Distance of an engine's half-precision log-probabilities from float32, relative to Hugging Face's own distance.

If two experts score almost the same, half precision may choose the other one, which can change that token's
probabilities by any amount. In Hugging Face's model this happens at other tokens than in ours. So for models with
experts the bounds hold for the nearest nine tenths of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .checkpoints import VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor

MEAN = 1.15
"""Bound of the mean difference, as a multiple of Hugging Face's; seen: 0.86 to 1.03.

Bloom is nearer, 0.33: Hugging Face rounds its ALiBi.
"""
LARGEST = 1.5
"""Bound of the largest difference, as a multiple of Hugging Face's; seen: 0.72 to 1.25, and 0.10 for Bloom."""
EXPERTS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen3_moe",
    "mixtral",
    "minimax_m2",
    "glm4_moe",
    "qwen3_next",
    "granitemoehybrid",
)
COMPARED = 0.9
"""Share of the tokens for which the bounds hold in a model with experts."""


def table(rows: Iterable[Mapping[str, float]], vocabulary: int = VOCABULARY) -> Tensor:
    """Turn the log-probabilities that an engine returned for each token into ``[tokens, vocabulary]``."""
    import torch

    return torch.tensor([[row[str(token)] for token in range(vocabulary)] for row in rows])


def exact(network: Any, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
    """Return a Hugging Face model's log-probabilities after every token but the last of each prompt, ``[tokens,
    vocabulary]``, and the largest hidden activation."""
    import torch

    rows, largest = [], 0.0
    with torch.no_grad():
        for prompt in prompts:
            output = network(torch.tensor([prompt]), output_hidden_states=True)
            rows.append(output.logits[0, :-1].float().log_softmax(-1))
            largest = max(largest, *(states.abs().max().item() for states in output.hidden_states))
    return torch.cat(rows), largest


def distances(found: Tensor, exact: Tensor, half: Tensor, compared: float = 1.0) -> tuple[float, float]:
    """Return mean and largest difference of the nearest share ``compared`` of tokens, relative to Hugging Face's."""
    ours, theirs = (_nearest((values - exact).abs(), compared) for values in (found, half))
    return (ours.mean() / theirs.mean()).item(), (ours.max() / theirs.max()).item()


def within(found: Tensor, exact: Tensor, half: Tensor, compared: float = 1.0) -> bool:
    """Whether the nearest share ``compared`` of tokens is as near as Hugging Face's."""
    mean, largest = distances(found, exact, half, compared)
    return mean <= MEAN and largest <= LARGEST


def _nearest(differences: Tensor, part: float) -> Tensor:
    """Return the share ``part`` of the rows with the smallest means."""
    return differences[differences.mean(dim=1).argsort()[: round(part * len(differences))]]
