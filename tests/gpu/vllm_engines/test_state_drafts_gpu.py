"""Drafts for models with layers that keep a state on a GPU, eagerly and from graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from host_engines import ON_GPU, OURS, Served, ran
from state_drafts import DraftsForStates, Run

UPDATES = {"qwen3_5": "gated_delta_rule_update", "mamba2": "selective_state_update"}


@pytest.mark.gpu
class TestDrafts(DraftsForStates):
    RUNS = (Run("qwen3_5", "mtp"), Run("qwen3_5", "mtp", compiled=True), Run("mamba2", "ngram", compiled=True))
    ENGINE = ON_GPU
    PLACE = OURS

    def test_states_advance_by_our_kernels(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        found = ran(served(run)[0].reports[0])
        assert run.compiled or found[UPDATES[run.model]] == {"default.triton"}  # in a graph a replay is no call
