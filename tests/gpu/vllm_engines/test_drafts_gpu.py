"""Drafts on a GPU, from graphs and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from drafting import NGRAM, DraftsForPlainModels, Run
from host_engines import ON_GPU, OURS, Call, Served, ran

EAGLE = frozenset({"draft prefill", "draft decode"})


@pytest.mark.gpu
class TestDrafts(DraftsForPlainModels):
    RUNS = (
        Run("eagle", "eagle", graphs=True, replayed=EAGLE),
        Run("eagle3", "eagle3", graphs=True, replayed=EAGLE),
        Run("eagle3, eagerly", "eagle3"),
        Run("draft model", "draft_model", graphs=True),
        Run("draft model, eagerly", "draft_model"),
        Run("predictor", "mtp", 1, graphs=True, replayed=frozenset({"draft prefill"})),
        Run("several predictors, eagerly", "several predictors", 3),
        Run("look-up", NGRAM, graphs=True),
    )
    ALONE = True  # choices are frozen where graphs are captured
    PLACE = OURS
    ENGINE = ON_GPU

    def calls(self) -> Sequence[Call]:
        return [Call("replays")]

    def test_target_and_drafter_replay_their_graphs(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        """A step that verifies has one token more than drafts for each request."""
        replayed = {(owner, mode, tokens) for owner, mode, tokens in served(run)[0].answers[-1].returned}
        if not run.graphs:
            assert replayed == set()
            return
        verified = {tokens for owner, mode, tokens in replayed if (owner, mode) == ("model", "FULL")}
        assert verified or run.method == NGRAM  # which may find less than asked for
        assert all(tokens % (run.tokens + 1) == 0 for tokens in verified)
        assert {owner for owner, mode, _ in replayed if mode == "FULL"} >= run.replayed

    def test_our_operators_run_in_both_models(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        attention = "mla_decode" if run.method in ("mtp", "several predictors") else "paged_attention"
        assert ran(served(run)[0].reports[0])[attention] == {"default.triton"}
