"""Quantized experts in vLLM's engines: what the dequantized network computes, within its own rounding."""

from __future__ import annotations

import pytest

from quantized_engines import Run
from quantized_mixture import BOTH_KINDS, EXPERTS, QuantizedMixtures
from sampling import drawn

TWO = {"tensor_parallel_size": 2}
RANKS = [
    Run(BOTH_KINDS[0], TWO, "each expert divided"),
    Run(BOTH_KINDS[1], TWO, "each expert divided"),
    Run(BOTH_KINDS[1], {**TWO, "enable_expert_parallel": True}, "the experts divided"),
]


@pytest.mark.engine
class TestQuantizedExperts(QuantizedMixtures):
    ALONE = [Run(name, kind="eager") for name in drawn(EXPERTS, 2, "quantized experts")]
    COMPILED = [Run(name, {"enforce_eager": False}, "compiled") for name in drawn(BOTH_KINDS, 1, "experts, compiled")]
    RUNS = [*ALONE, *COMPILED, *drawn(RANKS, 1, "experts, ranks")]
