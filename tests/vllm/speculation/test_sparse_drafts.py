"""Drafts beside sparse latent attention on a CPU, with wrong implementations and wrong lists.

A predictor has an indexer of its own, whose lists nothing but the number of right drafts shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafting import LONG, NGRAM, SHORT
from host_engines import WRONG, Pass, Served
from sampling import drawn
from sparse_drafts import Run, SparseDrafts

RUNS = (
    Run("deepseek_v32", NGRAM, alone=True),
    Run("glm_moe_dsa", NGRAM, compiled=True),
    Run("deepseek_v32", "mtp", 1, alone=True),
    Run("glm_moe_dsa", "mtp", 3),
    Run("glm_moe_dsa", "mtp", 3, shared=True, alone=True),
    Run("deepseek_v32", "mtp", 2, ranks=2),
    Run("glm_moe_dsa", NGRAM, ranks=2),
    Run("deepseek_v32", "mtp", 3, predictors=3),
    Run("deepseek_v32", "mtp", 2, predictors=3),
    Run("glm_moe_dsa", "mtp", 2, cache="fp8"),
    Run("deepseek_v32", NGRAM, cache="fp8"),
)
DRAWN = drawn(RUNS, 2, "drafts beside sparse latent attention")
READERS = [run for run in DRAWN if run.method == "mtp" and not run.shared]
PREDICTOR = "model.layers.3.self_attn.indexer"
FAULTS = ({"index_topk": WRONG}, {"mla_sparse": WRONG})
"""In the model and its predictor."""
SPOILED = {f"index_topk@{PREDICTOR}": WRONG}
"""In the predictor alone."""


@pytest.mark.engine
class TestDrafts(SparseDrafts):
    RUNS = DRAWN
    PLACE = {"plugins": ("wrong_plugin",), "deny": "wrong"}

    def last(self, run: Run) -> Sequence[Pass]:
        counted = Pass(LONG.prompts, LONG.max_tokens, drafts=True)
        spoiled = [counted, replace(counted, orders=SPOILED)] if run in READERS else []
        return [*spoiled, *(Pass(SHORT.prompts, SHORT.max_tokens, orders=wrong) for wrong in FAULTS)]

    def test_a_wrong_implementation_changes_the_tokens(
        self, run: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        drafted = served(run)[0]
        right, *wrong = (drafted.answers[number].tokens for number in (0, -2, -1))
        assert [tokens != right for tokens in wrong] == [True, True]

    @pytest.mark.parametrize("reader", READERS, ids=str)
    def test_a_predictor_that_reads_as_its_model_does_is_right_unless_its_lists_are_wrong(
        self, reader: Run, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        drafted = served(reader)[0]
        counts = torch.tensor([answer.drafts for answer in drafted.answers if answer.drafts])
        right, spoiled = (accepted / made for accepted, made in counts.diff(dim=0).tolist())
        assert spoiled < right
        assert right > (0.6 if reader.predictors == 1 else 0.4)  # each further one lacks a further token at the start
        assert {tuple(map(tuple, answer.tokens)) for answer in drafted.answers if answer.drafts} == {
            tuple(map(tuple, drafted.answers[2].tokens))
        }
