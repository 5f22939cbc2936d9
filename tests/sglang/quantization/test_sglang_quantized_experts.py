"""Quantized experts in SGLang's engines: what the dequantized network computes, within its own rounding."""

from __future__ import annotations

import pytest

from quantized_engines import Run
from quantized_mixture import BOTH_KINDS, EXPERTS, QuantizedMixtures
from sampling import drawn

TWO = {"tp_size": 2}
RANKS = [
    Run(BOTH_KINDS[0], TWO, "each expert divided"),
    Run(BOTH_KINDS[1], TWO, "each expert divided"),
    Run(BOTH_KINDS[1], {**TWO, "ep_size": 2}, "the experts divided"),
]


@pytest.mark.engine
class TestQuantizedExperts(QuantizedMixtures):
    ALONE = [Run(name) for name in drawn(EXPERTS, 1, "quantized experts, SGLang")]
    RUNS = [*ALONE, *drawn(RANKS, 1, "experts, ranks, SGLang")]
