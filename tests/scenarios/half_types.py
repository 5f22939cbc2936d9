"""Comparison of engines in half types with Hugging Face's network, by :mod:`fl_dispatch.cli.half_precision`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fl_dispatch.cli.half_precision import COMPARED, EXPERTS, exact, within
from running import reference_network

SPARSE = ("deepseek_v32", "glm_moe_dsa")
INDEX_KEYS = {"indexer_kv_dtype": "bf16"}
"""How vLLM's ``attention_config`` keeps index keys as Hugging Face's networks do; in fp8, as published, other tokens
are listed."""
LISTED = 0.75
"""The part of these families' tokens for which the bounds hold: a query may list others in a half type; seen: 1.09."""


def part_of(family: str) -> float:
    """Return the part of a family's tokens for which the bounds hold."""
    return LISTED if family in SPARSE else COMPARED if family in EXPERTS else 1.0


def as_near_as_hugging_face(
    family: str, model: Path, texts: Sequence[Sequence[int]], found: Tensor, dtype: str, less: Sequence[int] = ()
) -> bool:
    """Whether an engine's log-probabilities are as near to float32 as Hugging Face's in a half type.

    Args:
        family: the checkpoint's family.
        model: the checkpoint.
        texts: prompts with the engine's tokens.
        found: ``[tokens, vocabulary]`` after every token of each text but its last.
        dtype: the half type.
        less: number of tokens at the beginning of each text that ``found`` omits.
    """
    left = less or (0,) * len(texts)
    kept = torch.cat([torch.arange(len(text) - 1) >= first for text, first in zip(texts, left, strict=True)])
    single, half = (
        exact(reference_network(model, kind), texts)[0][kept] for kind in (torch.float32, getattr(torch, dtype))
    )
    assert found.shape == single.shape
    return within(found, single, half, part_of(family))
