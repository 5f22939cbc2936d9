"""The statistic for sampled tokens passes those of the network, and fails those of a verifier with a bias."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import drafters

SAMPLES = 1500
CHANCES = torch.tensor([0.5, 0.3, 0.2])
"""Of the three tokens that may follow any text."""


def network(texts: Tensor) -> SimpleNamespace:
    """Logits of five tokens, the same after every text."""
    behind = torch.full((2,), -30.0)
    return SimpleNamespace(
        logits=torch.cat((CHANCES.log() * drafters.TEMPERATURE, behind)).expand(1, texts.shape[1], 5)
    )


def sampled(too_often: float) -> list[list[int]]:
    """Pairs as a verifier would sample them that accepts a draft, the best token, that much too often."""
    chances = (1 - too_often) * CHANCES + too_often * torch.tensor([1.0, 0.0, 0.0])
    generator = torch.Generator().manual_seed(7)
    return torch.multinomial(chances, 2 * SAMPLES, replacement=True, generator=generator).view(-1, 2).tolist()


def test_right_tokens_pass() -> None:
    drafters.check_pairs(network, [1, 2, 3], sampled(0.0))


def test_tokens_of_a_verifier_that_accepts_a_fifth_of_the_drafts_blindly_fail() -> None:
    with pytest.raises(AssertionError):
        drafters.check_pairs(network, [1, 2, 3], sampled(0.2))
