"""vLLM's V2 model runner, which a device without Triton gets: its kernels in our forms, Hugging Face's tokens.

``test_features`` runs on either runner: sampling, structured output, the prefix cache, requests that join and leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, RUNNERS, STEP, python, start, start_features

from sampling import drawn
from vllm_fl.compat import model_runner

RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "sliding windows": ("gemma3", {}, {}),
    "experts": ("qwen3_moe", {}, {}),
    "latent attention": ("deepseek_v3", {}, {}),
    "chunks of prompts": ("llama", {"max_num_batched_tokens": 16, "max_num_seqs": 4}, {}),
    "two ranks": ("qwen3", {"tensor_parallel_size": 2}, {}),
    "two stages": ("qwen3", {"pipeline_parallel_size": 2}, {}),
    "compiled": ("qwen3", {"enforce_eager": False}, {}),
}
"""Name → checkpoint, arguments of ``LLM``, variables."""
DRAWN = drawn(tuple(RUNS), 2, "V2 runner")


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[[str], Path]) -> dict[str, Future[dict[str, Any]]]:
    jobs = {}
    for name in DRAWN:
        family, engine, variables = RUNS[name]
        jobs[name] = start(checkpoint(family), STEP, STEP, engine=dict(engine), variables=variables)
    return jobs


@pytest.mark.parametrize("name", DRAWN)
def test_tokens_equal_hugging_face_twice(
    name: str, runs: dict[str, Future[dict[str, Any]]], expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[name].result()
    whole = expected(RUNS[name][0])
    assert [step["tokens"] for step in result["steps"]] == [whole, whole]
    assert result["report"]["model_runner"] == "V2"
    assert result["report"]["runner_kernels"] == "C++ and PyTorch"
    assert "model runner V2, because vLLM prefers it" in result["log"]
    assert result["report"]["failed"] == {}


def test_a_request_replays_its_trace_and_the_one_beside_it_does_not(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    trace = [7, 8, 9, 7]
    sampling = [{"max_tokens": MAX_TOKENS, "trace_decode_token_ids": trace}, {"max_tokens": MAX_TOKENS}]
    steps = [{"do": "generate", "prompts": PROMPTS[:2], "sampling": sampling}]
    (found,) = start_features((checkpoint("qwen3"), steps, {"enable_trace_replay": True})).result()["runs"]
    assert found["report"]["model_runner"] == "V2"
    assert [output["tokens"] for output in found["steps"][0]] == [[trace], [expected("qwen3")[1]]]


SPECULATES = """
from vllm import LLM
drafts = {{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "rejection_sample_method": "block"}}
LLM(model={model!r}, speculative_config=drafts)
"""


def test_a_feature_without_forms_is_refused_where_the_user_asks_for_the_runner(
    checkpoint: Callable[[str], Path],
) -> None:
    ended = python("-c", SPECULATES.format(model=str(checkpoint("qwen3"))), **RUNNERS["V2"])
    assert ended.returncode != 0
    assert "Model Runner V2 does not yet support: drafts verified by blocks without Triton" in ended.log


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        (["vllm.v1.sample.logits_processor:AdapterLogitsProcessor"], ["processors of logits that are written for V1"]),
        (["fl_dispatch.cli.bisect.engine_hooks:ForcedTokens"], []),  # it serves both
        (["vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor"], []),
        (["nobody.has:This"], []),
        (None, []),
    ],
)
def test_v1_runs_processors_of_logits_that_are_written_for_it(given: list[str] | None, lacking: list[str]) -> None:
    model = SimpleNamespace(logits_processors=given)
    config: Any = SimpleNamespace(parallel_config=None, speculative_config=None, model_config=model)
    assert model_runner.without_forms(config) == lacking


def test_a_worker_on_a_cpu_keeps_its_large_buffers(runs: dict[str, Future[dict[str, Any]]]) -> None:
    assert "heap: keeps up to 512 MiB for buffers of the next step: True" in runs[DRAWN[0]].result()["log"]
