"""Vectors and classes of texts under SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import variants
from pooled import LABELS, Pooling


@pytest.mark.engine
class TestPooling(Pooling):
    ENGINE = {"is_embedding": True}
    WHOLE = {"chunked_prefill_size": -1, "disable_radix_cache": True, "mem_fraction_static": 0.5}
    PROBABILITIES = False

    def classifier(self, model: Path, target: Path) -> Path:
        """SGLang's head has a bias, which it leaves as it finds memory where a checkpoint has none."""
        return variants.said(super().classifier(model, target), {"score.bias": torch.zeros(LABELS)})

    def encoder(self, target: Path) -> Path:
        """Transformers writes this field no more, and SGLang reads it."""
        return variants.said(super().encoder(target), {}, position_embedding_type="absolute")
