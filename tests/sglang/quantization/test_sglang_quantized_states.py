"""Quantized models whose layers keep a state in SGLang's engines, on a CPU: in one rank, and divided among two."""

from __future__ import annotations

import pytest

from quantized_states import OF_SGLANG, PLANTED_PAIRS, SCHEMES_OF_STATES, SIZES, WHOLE, Mistaken, QuantizedStates, Run
from sampling import drawn

PAIRS = [(name, scheme) for name in SIZES for scheme in SCHEMES_OF_STATES]
RANKS = [
    ("qwen3_5", "compressed-tensors W8A8 fp8"),
    ("qwen3_next", "compressed-tensors W8A8 fp8"),
    ("nemotron_h", "compressed-tensors W4A16"),
    ("qwen3_5", "gptq"),
    ("qwen3_5", "fp8, blocks of 128"),
    ("nemotron_h", "fp8, blocks of 128"),
    ("nemotron_h", "compressed-tensors W8A8 int8"),
    ("qwen3_next", "compressed-tensors W4A16"),
    ("qwen3_next", "awq"),
    ("qwen3_next", "gptq"),
]


@pytest.mark.engine
class TestQuantizedStates(QuantizedStates):
    ALONE = [Run(scheme, model=name) for name, scheme in drawn(PAIRS, 1, "quantized states, SGLang")]
    RUNS = [
        *ALONE,
        *(
            Run(scheme, {"tp_size": 2}, "two ranks", name, WHOLE if "blocks" in scheme else {})
            for name, scheme in drawn(RANKS, 1, "quantized states, ranks, SGLang")
        ),
    ]
    MISTAKEN = [Mistaken(scheme, model=name) for name, scheme in drawn(PLANTED_PAIRS, 1, "wrong scales, SGLang")]
    OPTIONS = {"max_mamba_cache_size": 32}  # else states have most of the memory, in each rank
    PRODUCTS = OF_SGLANG
