"""vLLM serves no weight that a checkpoint did not fill, and drops no tensor of it, without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import HERE, environment

import unfitting
from unfitting import Outcomes

CASES = {
    **unfitting.CASES,
    "a tensor": replace(
        unfitting.EXTRA,
        refused=r"'model\.layers\.0\.mlp\.bonus\.weight' of .*model\.safetensors .* cannot be loaded .*no module",
    ),
    "another head": unfitting.HEAD,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    script = HERE / "load_models.py"
    return unfitting.load_all(tmp_path_factory.mktemp("unfitting"), CASES, script, environment())


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_tensor(name: str, outcomes: Outcomes) -> None:
    unfitting.check_refusal(CASES[name], outcomes[name])


@pytest.mark.parametrize("name", unfitting.warned(CASES))
def test_weights_that_hugging_face_would_load_instead_are_named(name: str, outcomes: Outcomes) -> None:
    unfitting.check_warning(CASES[name], outcomes[name])
