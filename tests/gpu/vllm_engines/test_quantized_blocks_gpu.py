"""Blocks of fp8 that fit no merged layer, in engines on a GPU: the rules of the same models on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from test_quantized_blocks import (
    TestNumbers,
    answers,
    compared,
    models,
    test_its_products_in_blocks_are_all_ours,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    return {"gpu_memory_utilization": 0.1}


__all__ = ["TestNumbers", "answers", "compared", "models", "test_its_products_in_blocks_are_all_ours"]
