"""Blocks of fp8 that fit no merged layer, in SGLang's engines: what the dequantized network computes."""

from __future__ import annotations

import pytest

from quantized_blocks import QuantizedBlocks


@pytest.mark.engine
class TestBlocks(QuantizedBlocks):
    """Each of the models."""
