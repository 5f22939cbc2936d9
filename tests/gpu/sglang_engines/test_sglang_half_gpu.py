"""In half types SGLang on a GPU is as near to float32 as Hugging Face is in the same type, in prefill and from graphs.

Teacher forced: Hugging Face's network gets the tokens that the engine chose. The first pass has the log-probabilities
after every token of prompts and answers. The second one finds its prompts in the cache, and has those of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, STEP, TREES, all_is_ours, every_score, replayed, start, texts

from fl_dispatch.cli.checkpoints import VOCABULARY
from half_types import as_near_as_hugging_face
from running import MAX_TOKENS, PROMPTS, ran

pytestmark = pytest.mark.gpu
FAMILIES = ("llama", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32")
CHOICES: Mapping[str, Mapping[str, str]] = {
    "ours": NEUTRAL,
    "as shipped": TREES,
    "a wrong norm": {
        **NEUTRAL,
        "SGLANG_FL_PLUGIN_MODULES": "wrong_plugin",
        "SGLANG_FL_PER_OP": "rms_norm=impl:vendor.wrong",
    },
}
"""Name → variables of the engine."""
CASES = [
    *((family, "bfloat16", choice) for family in FAMILIES for choice in ("ours", "as shipped")),
    *((family, "float16", "ours") for family in FAMILIES),
]
WRONG = ("llama", "bfloat16", "a wrong norm")
ALL = {"return_logprob": True, "top_logprobs_num": VOCABULARY}
STEPS = ({**STEP, "scores": True, "more": ALL}, {**STEP, "more": ALL})
each = pytest.mark.parametrize(("family", "dtype", "choice"), CASES)

Run = Callable[[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> Run:
    """Family, type and choice → two passes over the prompts."""
    runs = {
        (family, dtype, choice): start(checkpoint(family), *STEPS, engine={"dtype": dtype}, variables=CHOICES[choice])
        for family, dtype, choice in (*CASES, WRONG)
    }
    return lambda *case: runs[case].result()


@each
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    family: str, dtype: str, choice: str, result: Run, checkpoint: Callable[[str], Path]
) -> None:
    step = result(family, dtype, choice)["steps"][0]
    assert as_near_as_hugging_face(family, checkpoint(family), texts(step), every_score(step), dtype)


@each
def test_so_are_those_of_answers_to_prompts_that_are_in_the_cache(
    family: str, dtype: str, choice: str, result: Run, checkpoint: Callable[[str], Path]
) -> None:
    step = result(family, dtype, choice)["steps"][1]
    assert max(step["cached"]) >= 320
    less = [len(prompt) - 1 for prompt in PROMPTS]
    assert as_near_as_hugging_face(family, checkpoint(family), texts(step), every_score(step), dtype, less)


def test_a_wrong_norm_is_noticed(result: Run, checkpoint: Callable[[str], Path]) -> None:
    family, dtype, _ = WRONG
    step = result(*WRONG)["steps"][0]
    assert ran(result(*WRONG), "rms_norm") == {"vendor.wrong"}
    assert not as_near_as_hugging_face(family, checkpoint(family), texts(step), every_score(step), dtype)


@each
def test_layers_are_ours_and_graphs_held_their_kernels(family: str, dtype: str, choice: str, result: Run) -> None:
    found = result(family, dtype, choice)
    attention = ran(found, "paged_attention") | ran(found, "mla_decode") | ran(found, "mla_sparse")
    assert "reference.torch" not in attention
    if choice == "ours":
        assert attention == ran(found, "rms_norm") == ran(found, "kv_cache_write") == OURS
    assert all_is_ours(found["report"])
    assert replayed(found["report"], 2 * (MAX_TOKENS - 1))
