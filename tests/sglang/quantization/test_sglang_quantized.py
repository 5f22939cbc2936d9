"""Quantized checkpoints in SGLang's engines: what the dequantized network computes, within its own rounding."""

from __future__ import annotations

import pytest

from quantized_checkpoints import SCHEMES
from quantized_engines import QuantizedModels, Run
from sampling import drawn

DIVISIBLE = ("compressed-tensors W8A8 int8", "compressed-tensors W4A16, zero points", "gptq", "awq", "fp8")
"""Schemes of which two ranks divide the small model."""


@pytest.mark.engine
class TestQuantized(QuantizedModels):
    ALONE = [Run(name) for name in drawn(list(SCHEMES), 2, "quantized checkpoints, SGLang")]
    RUNS = [
        *ALONE,
        *(Run(name, {"tp_size": 2}, "two ranks") for name in drawn(DIVISIBLE, 1, "quantized, ranks, SGLang")),
    ]
