"""vLLM's V2 model runner on the emulated NPU: its kernels in PyTorch forms, for which the host waits in no step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chip_engines import STEP, start

import drafters
import variants
from half_on_npu import as_near_as_hugging_face, clear_tokens
from processes import Runs
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

FAMILY, DTYPE = "llama", "float16"
"""bfloat16 decides few tokens."""
CHOICES = ["alpha", "beta"]
NEVER, ONLY = 7, [11, 12, 13, 14]
SEEDED = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "seed": 7}
SAMPLED: list[Mapping[str, Any]] = [
    SEEDED,
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"logit_bias": {str(NEVER): 100.0}, "bad_words": ["%"]},
    {"allowed_token_ids": ONLY},
]
"""Of each prompt; ``%`` is a token of the tokenizer that spells."""
CONSTRAINED = [{"structured_outputs": {"choice": CHOICES}, "ignore_eos": False, "max_tokens": 12}, {}, {}, {}]
DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
}
FAMILIES = {"V2": FAMILY, **dict.fromkeys(DRAFTS, FAMILY), "mtp": "deepseek_v3"}
"""Engine → the family of its model."""
DRAWN = drawn(tuple(DRAFTS), 1, "who drafts on the NPU")
COUNTED = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"
WAITED_FOR = {"_to_copy", "nonzero"}
"""Lengths beside drafts, because vLLM's copies on the host are bounds, and the slots that a draft's batch skips."""


@pytest.fixture(scope="module")
def spelling(chip_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, less sure of its tokens, with a tokenizer that knows every byte."""
    folder = tmp_path_factory.mktemp("spelling")
    return variants.with_characters(variants.unsure(chip_checkpoint(FAMILY), folder / "unsure", 0.02), folder / FAMILY)


@pytest.fixture(scope="module")
def results(
    chip_checkpoint: Callable[[str], Path],
    spelling: Path,
    npu_environment: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Any]:
    """An engine that samples in each way, and those with drafts."""
    folder = tmp_path_factory.mktemp("drafters")
    again = {**STEP, "prompts": [PROMPTS[3], PROMPTS[0]], "sampling": [{}, SEEDED], "reset": True}
    steps = [STEP, {**STEP, "sampling": SAMPLED}, again, {**STEP, "sampling": CONSTRAINED}]
    runs = {"V2": start(spelling, DTYPE, steps, npu_environment())}
    made = {
        "draft_model": drafters.noisy,
        "eagle": drafters.eagle,
        "eagle3": drafters.eagle3,
        "mtp": drafters.with_mtp,
    }
    for name in DRAWN:
        model = chip_checkpoint(FAMILIES[name])
        written = {"model": str(made[name](model, folder / name))} if name in made else {}
        target = folder / name if name == "mtp" else model
        drafted = {"speculative_config": {**DRAFTS[name], **written}, "disable_log_stats": False}
        turns = {"prompts": drafters.TURNS, "max_tokens": drafters.LONG}
        more = {"max_num_batched_tokens": 256, **drafted}
        runs[name] = start(target, DTYPE, [STEP, turns], npu_environment(), **more)
    return Runs(runs)


def test_vllm_prefers_the_v2_runner_and_its_kernels_are_pytorch(results: Mapping[str, Any]) -> None:
    report = results["V2"]["report"]
    assert (report["model_runner"], report["runner_kernels"]) == ("V2", "PyTorch")


@pytest.mark.parametrize("name", ["V2", *DRAWN])
def test_greedy_tokens_equal_hugging_faces(
    name: str, results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path], spelling: Path
) -> None:
    family, step = FAMILIES[name], results[name]["steps"][0]
    model = spelling if name == "V2" else chip_checkpoint(family)
    clear = clear_tokens(model, PROMPTS, MAX_TOKENS, DTYPE)
    assert sum(map(len, clear)) >= 24
    assert [tokens[: len(some)] for tokens, some in zip(step["tokens"], clear, strict=True)] == clear
    assert as_near_as_hugging_face(family, model, PROMPTS, step, DTYPE)


def test_the_host_waits_in_no_step_however_tokens_are_chosen(results: Mapping[str, Any]) -> None:
    assert [step["waits"] for step in results["V2"]["steps"]] == [{}] * 4


def test_a_seed_draws_the_same_tokens_in_another_batch(results: Mapping[str, Any]) -> None:
    greedy, sampled, again, _ = (step["tokens"] for step in results["V2"]["steps"])
    assert sampled[0] == again[1] != greedy[0]


def test_penalties_biases_and_lists_choose_tokens(results: Mapping[str, Any]) -> None:
    greedy, (_, penalized, biased, listed), *_ = (step["tokens"] for step in results["V2"]["steps"])
    assert len(set(penalized)) > len(set(greedy[1]))
    assert biased == [NEVER] * MAX_TOKENS
    assert set(listed) <= {*ONLY}


def test_structured_output_is_what_was_asked_for_beside_free_requests(results: Mapping[str, Any]) -> None:
    step = results["V2"]["steps"][3]
    assert step["texts"][0] in CHOICES
    assert step["tokens"][1:] == results["V2"]["steps"][0]["tokens"][1:]


@pytest.mark.parametrize("name", DRAWN)
def test_drafts_are_accepted_and_rejected(name: str, results: Mapping[str, Any]) -> None:
    accepted, made = (results[name]["metrics"][one] for one in COUNTED)
    assert 0 < accepted < made
    assert results[name]["report"]["model_runner"] == "V2"


@pytest.mark.parametrize("name", DRAWN)
def test_beside_drafts_attention_alone_waits(name: str, results: Mapping[str, Any]) -> None:
    assert set(results[name]["steps"][0]["waits"]) <= WAITED_FOR
