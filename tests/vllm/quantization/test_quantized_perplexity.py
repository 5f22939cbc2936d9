"""The perplexity of held-out text under each quantization in vLLM's engines, in every dtype."""

from __future__ import annotations

import pytest

from perplexities import CASES, QuantizedPerplexity
from sampling import drawn


@pytest.mark.engine
class TestPerplexity(QuantizedPerplexity):
    DRAWN = drawn(CASES, 2, "perplexities of quantized models")
    OPTIONS = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
