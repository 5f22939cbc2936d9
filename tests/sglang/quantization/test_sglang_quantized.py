"""Quantized checkpoints in SGLang's engines: what the dequantized network computes, within its own rounding."""

from __future__ import annotations

import pytest

from quantized_checkpoints import SCHEMES
from quantized_engines import FAMILIES, QuantizedModels, Run
from sampling import drawn


@pytest.mark.engine
class TestQuantized(QuantizedModels):
    ALONE = [Run(name) for name in drawn(list(SCHEMES), 2, "quantized checkpoints, SGLang")]
    DIVIDED = [Run(name, {"tp_size": 2}, "two ranks") for name in drawn(FAMILIES, 1, "quantized, ranks, SGLang")]
    RUNS = [*ALONE, *DIVIDED]
