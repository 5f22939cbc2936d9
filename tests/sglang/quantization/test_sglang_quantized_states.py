"""Quantized models whose layers keep a state in SGLang's engines, on a CPU."""

from __future__ import annotations

import pytest

from quantized_states import PLANTED_PAIRS, PRODUCTS, SCHEMES_OF_STATES, SIZES, Mistaken, QuantizedStates, Run
from sampling import drawn

PAIRS = [(name, scheme) for name in SIZES for scheme in SCHEMES_OF_STATES]


@pytest.mark.engine
class TestQuantizedStates(QuantizedStates):
    ALONE = [Run(scheme, model=name) for name, scheme in drawn(PAIRS, 1, "quantized states, SGLang")]
    RUNS = ALONE
    MISTAKEN = [Mistaken(scheme, model=name) for name, scheme in drawn(PLANTED_PAIRS, 1, "wrong scales, SGLang")]
    PRODUCTS = {**PRODUCTS, "lfm2": 20}  # LFM2's gate and up products stay two
