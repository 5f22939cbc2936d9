"""Blocks of fp8 that fit no merged layer, in engines on a GPU: the rules of the same models on a CPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from quantized_blocks import QuantizedBlocks


@pytest.mark.gpu
class TestBlocks(QuantizedBlocks):
    """Each of the models."""

    OPTIONS = {"gpu_memory_utilization": 0.1}
