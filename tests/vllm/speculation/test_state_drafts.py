"""Drafts for models with layers that keep a state: the state goes back to what was accepted."""

from __future__ import annotations

import pytest

from sampling import drawn
from state_drafts import TIED, DraftsForStates, Run

RUNS = (
    Run("qwen3_5", "mtp"),
    Run("qwen3_5", "mtp", "compressed-tensors W8A16 fp8"),
    Run("qwen3_5", "mtp", compiled=True),
    Run("qwen3_5", "ngram"),
    Run("mamba2", "ngram"),
    Run("granitemoehybrid", "ngram"),
    Run("lfm2", "ngram"),
)
DRAWN = drawn(RUNS, 2, "drafts for states")


@pytest.mark.engine
class TestDrafts(DraftsForStates):
    RUNS = DRAWN
    EXACT = [run for run in DRAWN if not run.scheme]
    TOLD = [run for run in EXACT if run.model != TIED]
    ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 128 << 20}
