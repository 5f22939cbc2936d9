"""Drafts of a model, an EAGLE head or a predictor of one more token under vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from drafting import DraftsForPlainModels, Run
from host_engines import Served
from sampling import drawn

RUNS = (
    Run("draft_model", "draft_model", sampled="probabilistic"),
    Run("eagle", "eagle", graphs=True, sampled="greedy"),
    Run("eagle3", "eagle3", sampled="probabilistic"),
    Run("mtp", "mtp", 1, sampled="greedy"),
    Run("several predictors", "several predictors", sampled="probabilistic"),
)


@pytest.mark.engine
class TestDrafts(DraftsForPlainModels):
    RUNS = TOLD = drawn(RUNS, 2, "who drafts")
    ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 256}

    def test_the_drafter_runs_our_operators_too(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        drafted, plain = (engine.reports[0] for engine in served(run))
        assert sum(drafted["attention"].values()) > sum(plain["attention"].values()) > 0
        assert (drafted["compiled"] is not None) == run.graphs
