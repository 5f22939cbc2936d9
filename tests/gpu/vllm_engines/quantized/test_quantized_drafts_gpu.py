"""Drafts beside weights in fp8 on a GPU, from graphs and eagerly.

The dense models are in float32, their inputs as they are or quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from drafting import Models
from host_engines import ON_GPU, OURS, Served, ran
from quantized_checkpoints import SCHEMES
from quantized_drafts import QuantizedDrafts, Run

EAGLE, BOTH = Run("eagle3", "compressed-tensors W8A16 fp8", ""), Run("draft_model", "fp8", "fp8")


@pytest.mark.gpu
class TestFromGraphs(QuantizedDrafts):
    RUNS = (EAGLE, BOTH)
    ALONE = True  # choices are frozen where graphs are captured
    PLACE = OURS
    ENGINE = {**ON_GPU, "enforce_eager": False}

    def drafting(self, run: Run, made: Models) -> Mapping[str, Any]:
        return {"speculative_config": run.speculation(made.drafter)}

    def used(self, report: Mapping[str, Any], scheme: str) -> int:
        return int(report["layers"].get(SCHEMES[scheme].layer, 0))

    def test_our_products_run_by_our_kernels(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        assert ran(served(run)[0].reports[0])[SCHEMES[run.target].operators[-1]] == {"default.triton"}


class TestEagerly(TestFromGraphs):
    RUNS = (EAGLE,)
    ENGINE = {**ON_GPU, "enforce_eager": True}
