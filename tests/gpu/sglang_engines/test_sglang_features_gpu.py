"""Features of requests in SGLang on a GPU with graphs: the tests that an engine on a CPU has, with this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, STEP, replayed, start
from test_sglang_features import (  # noqa: F401  fixtures, and tests that run here too
    PENALTIES,
    STRUCTURES,
    models,
    network,
    steps,
    test_a_bias_and_a_processor_of_logits_decide,
    test_a_penalty_changes_the_tokens_as_it_should,
    test_a_session_goes_on_where_it_was,
    test_a_stop_token_ends_the_answer_where_it_may,
    test_an_answer_has_the_structure_that_was_asked_for,
    test_every_layer_is_ours,
    test_log_probabilities_of_the_best_and_of_named_tokens_are_hugging_faces,
    test_one_prompt_is_answered_twice,
)

from running import MAX_TOKENS, ran

pytestmark = pytest.mark.gpu
ASKED = ("scores", *PENALTIES, "bias", "stop", "later", "forced", "twice", *STRUCTURES, "first", "second")


@pytest.fixture(scope="module")
def answers(models: tuple[Path, Path], expected: Callable[[str], list[list[int]]]) -> dict[str, Any]:  # noqa: F811
    """Everything that the engine gave."""
    named = steps(models[1], models[0], expected("qwen3")[0][3])
    engine = {
        "grammar_backend": "xgrammar",
        "enable_custom_logit_processor": True,
        "disable_overlap_schedule": True,  # with it SGLang's penalties come a step late
        "constrained_json_disable_any_whitespace": True,
    }
    asked = (named[name] for name in ASKED)
    return start(models[0], STEP, *asked, engine=engine, variables=NEUTRAL).result()


@pytest.fixture(scope="module")
def result(answers: dict[str, Any]) -> Callable[[str], Any]:
    """A step's name → what it gave; ``report``: the engine's."""
    _, *found = answers["steps"]
    return {**dict(zip(ASKED, found, strict=True)), "report": answers["report"]}.__getitem__


def test_graphs_decoded_by_our_kernels(answers: dict[str, Any], expected: Callable[[str], list[list[int]]]) -> None:
    assert answers["steps"][0]["tokens"] == expected("qwen3")
    assert replayed(answers["report"], 6 * MAX_TOKENS)
    assert ran(answers, "paged_attention") == OURS
