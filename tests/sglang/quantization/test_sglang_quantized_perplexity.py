"""The perplexity of held-out text under each quantization in SGLang's engines, in every dtype."""

from __future__ import annotations

import pytest

from perplexities import CASES, QuantizedPerplexity
from sampling import drawn


@pytest.mark.engine
class TestPerplexity(QuantizedPerplexity):
    DRAWN = drawn(CASES, 1, "perplexities of quantized models, SGLang")
