"""SGLang serves no weight that a checkpoint did not fill, and drops no tensor of it, without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serving import HERE, environment

import unfitting
from unfitting import Outcomes

CASES = {
    **unfitting.CASES,
    "a tensor": replace(
        unfitting.EXTRA,
        refused=r"nothing in the model made use of 'model\.layers\.0\.mlp\.bonus\.weight' of .*safetensors",
    ),
    "another head": replace(unfitting.HEAD, warned=r"the file has another head, 'lm_head\.weight', which is served"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    script = HERE / "load_models.py"
    return unfitting.load_all(tmp_path_factory.mktemp("unfitting"), CASES, script, environment())


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_tensor(name: str, outcomes: Outcomes) -> None:
    unfitting.check_refusal(CASES[name], outcomes[name])


@pytest.mark.parametrize("name", unfitting.warned(CASES))
def test_what_is_served_in_the_place_of_something_else_is_named(name: str, outcomes: Outcomes) -> None:
    unfitting.check_warning(CASES[name], outcomes[name])


def test_a_head_that_is_not_the_embedding_is_served_and_an_equal_one_is_tied(
    outcomes: Outcomes,
) -> None:
    assert outcomes["another head"]["head"] == "ParallelLMHead"
    assert outcomes["an equal head"]["head"] == "VocabParallelEmbedding"
