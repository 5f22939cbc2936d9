"""LoRA adapters beside quantized weights in SGLang's engines."""

from __future__ import annotations

import pytest

from quantized_engines import FAMILIES, Run
from quantized_lora import QuantizedAdapters
from sampling import drawn

LORA = {"max_loras_per_batch": 3, "max_lora_rank": 8, "max_running_requests": 6}


@pytest.mark.engine
class TestAdapters(QuantizedAdapters):
    RUNS = [Run(name, LORA) for name in drawn(FAMILIES, 1, "quantized, adapters, SGLang")]
