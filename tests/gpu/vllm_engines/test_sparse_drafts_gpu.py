"""Drafts beside sparse latent attention on a GPU, from graphs and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from drafting import NGRAM, Models
from host_engines import ON_GPU, OURS, Call, Served, ran
from sparse_drafts import Run, SparseDrafts


@pytest.mark.gpu
class TestDrafts(SparseDrafts):
    RUNS = (
        Run("glm_moe_dsa", "mtp", 3, compiled=True),
        Run("glm_moe_dsa", "mtp", 3, shared=True, compiled=True),
        Run("deepseek_v32", "mtp", 1),
        Run("deepseek_v32", "mtp", 2, compiled=True),
        Run("deepseek_v32", "mtp", 3, predictors=3),
        Run("deepseek_v32", NGRAM, compiled=True),
    )
    ALONE = True  # choices are frozen where graphs are captured
    COMPILED = {}
    PLACE = OURS

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        return {**super().options(run, made, drafts), **ON_GPU, "max_num_batched_tokens": 64}

    def calls(self) -> Sequence[Call]:
        return [Call("replays")]

    def test_steps_that_check_drafts_replay_graphs_if_they_are_allowed(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        replayed = {(owner, mode) for owner, mode, _ in served(run)[0].answers[-1].returned}
        assert (("model", "FULL") in replayed) == run.compiled

    def test_our_kernels_run(self, run: Run, served: Callable[[Any], tuple[Served, Served]]) -> None:
        found = ran(served(run)[0].reports[0])
        assert all(found[operator] == {"default.triton"} for operator in ("index_topk", "mla_sparse"))
