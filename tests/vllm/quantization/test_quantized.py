"""Quantized checkpoints in vLLM's engines: what the dequantized network computes, within its own rounding.

Eager engines of the drawn schemes, one compiled as users have it by default, and one of two ranks.
"""

from __future__ import annotations

import pytest

from quantized_checkpoints import SCHEMES
from quantized_engines import QuantizedModels, Run
from sampling import drawn


@pytest.mark.engine
class TestQuantized(QuantizedModels):
    ALONE = [Run(name, kind="eager") for name in drawn(list(SCHEMES), 3, "quantized checkpoints")]
    COMPILED = [
        Run(name, {"enforce_eager": False}, "compiled") for name in drawn(list(SCHEMES), 1, "quantized, compiled")
    ]
    DIVIDED = [
        Run(name, {"tensor_parallel_size": 2}, "two ranks") for name in drawn(list(SCHEMES), 1, "quantized, ranks")
    ]
    RUNS = [*ALONE, *COMPILED, *DIVIDED]
