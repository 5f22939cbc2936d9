"""A seed gives a request the same tokens, however many steps read its prompt and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, RUNNERS, start_features

LONG = max(PROMPTS, key=len)
SEEDED = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 7}
SAMPLED = {**SEEDED, "seed": None}
STEPS = (
    {"do": "generate", "prompts": [LONG], "sampling": SEEDED},
    {"do": "reset_prefix_cache"},
    {"do": "generate", "prompts": PROMPTS, "sampling": [SAMPLED, SAMPLED, SEEDED, SAMPLED]},
    {"do": "reset_prefix_cache"},
    {"do": "generate", "prompts": [LONG], "sampling": {**SEEDED, "seed": 8}},
)
ONE_STEP = {"max_num_batched_tokens": 512}


@pytest.fixture(scope="module", params=["V1"])
def answers(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Mapping[str, list[Any]]:
    """Tokens of the long prompt, read in chunks and in one step: alone, beside others, and with another seed."""
    model = checkpoint("llama")
    chunks, whole = start_features((model, STEPS, {}), (model, STEPS, ONE_STEP), **RUNNERS[request.param]).result()[
        "runs"
    ]
    place = PROMPTS.index(LONG)
    return {
        name: [run["steps"][0][0]["tokens"][0], run["steps"][2][place]["tokens"][0], run["steps"][4][0]["tokens"][0]]
        for name, run in (("chunks", chunks), ("whole", whole))
    }


def test_a_prompt_in_chunks_draws_the_tokens_of_one_in_a_single_step(answers: Mapping[str, list[Any]]) -> None:
    assert answers["chunks"] == answers["whole"]


def test_other_requests_change_no_token_and_another_seed_does(answers: Mapping[str, list[Any]]) -> None:
    alone, beside, other = answers["chunks"]
    assert alone == beside != other
