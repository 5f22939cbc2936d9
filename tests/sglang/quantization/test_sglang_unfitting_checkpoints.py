"""Checkpoints that do not quite fit, under SGLang."""

from __future__ import annotations

from collections.abc import Mapping

from unfitting import Outcome, UnfittingCheckpoints


class TestCheckpoints(UnfittingCheckpoints):
    EXTRA = r"nothing in the model made use of 'model\.layers\.0\.mlp\.bonus\.weight' of .*safetensors"
    HEAD_WARNED = r"the file has another head, 'lm_head\.weight', which is served"

    def test_a_head_that_is_not_the_embedding_is_served_and_an_equal_one_is_tied(
        self, outcomes: Mapping[str, Outcome]
    ) -> None:
        assert outcomes["another head"]["head"] == "ParallelLMHead"
        assert outcomes["an equal head"]["head"] == "VocabParallelEmbedding"
