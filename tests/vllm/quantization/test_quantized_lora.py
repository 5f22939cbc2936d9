"""LoRA adapters beside quantized weights in vLLM's engines, eager and compiled."""

from __future__ import annotations

import pytest

from quantized_engines import FAMILIES, Run
from quantized_lora import QuantizedAdapters
from sampling import drawn

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_num_seqs": 6}
WAYS = {"eager": {}, "compiled": {"enforce_eager": False}}
CASES = [Run(name, {**LORA, **how}, kind) for name in FAMILIES for kind, how in WAYS.items()]


@pytest.mark.engine
class TestAdapters(QuantizedAdapters):
    RUNS = drawn(CASES, 1, "quantized, adapters")
    OPERATORS = ("lora_shrink", "lora_expand")
