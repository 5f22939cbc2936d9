"""vLLM 0.33 on the emulated NPU makes several steps per scheduler call, and requests get the tokens of single steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chip_engines import start

from half_on_npu import DTYPES
from host_files import files_of_vllm
from processes import Runs
from running import PROMPTS

FAMILY, MOST, NEW = "llama", 8, 40
SEEDED = {"temperature": 1.0, "seed": 7, "top_k": 40}
ENDING = {"stop_token_ids": list(range(3, 260, 9)), "ignore_eos": False}
ASKED: Mapping[str, Mapping[str, Any]] = {"greedy": {}, "seeds": SEEDED, "end tokens": ENDING}
"""Subject → options of each prompt's sampling."""


@pytest.fixture(scope="module")
def results(
    chip_checkpoint: Callable[[str], Path], npu_environment: Callable[..., dict[str, str]]
) -> Mapping[str, Any]:
    path = os.pathsep.join((str(files_of_vllm("0.33")), os.environ.get("PYTHONPATH", "")))
    variables = {"PYTHONPATH": path, "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_FL_STEPS_MS": "10000"}
    asked = {"prompts": PROMPTS, "max_tokens": NEW, "scores": True}  # with the scores of all tokens, steps are single
    steps = [{**asked, "sampling": [own] * len(PROMPTS)} for own in ASKED.values()]
    runs = {
        name: start(chip_checkpoint(FAMILY), DTYPES[FAMILY], steps, npu_environment(**variables, VLLM_FL_STEPS=most))
        for name, most in {"one": "1", "several": str(MOST)}.items()
    }
    return Runs(runs)


@pytest.mark.parametrize("subject", ASKED)
def test_requests_get_what_single_steps_give_them(subject: str, results: Mapping[str, Any]) -> None:
    one, several = (results[name]["steps"][list(ASKED).index(subject)]["tokens"] for name in ("one", "several"))
    assert several == one


def test_some_request_ended_before_its_last_token(results: Mapping[str, Any]) -> None:
    assert min(map(len, results["several"]["steps"][-1]["tokens"])) < NEW


def test_schedulings_made_several_steps(results: Mapping[str, Any]) -> None:
    assert results["one"]["report"]["steps"] is None
    assert results["several"]["report"]["steps"][str(MOST)] > 0


def test_single_steps_wait_for_nothing_and_several_for_the_lengths_of_contexts(results: Mapping[str, Any]) -> None:
    assert [step["waits"] for step in results["one"]["steps"]] == [{}] * len(ASKED)
    assert all(step["waits"].keys() == {"_to_copy"} for step in results["several"]["steps"])
