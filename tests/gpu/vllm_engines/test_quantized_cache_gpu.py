"""A KV cache in fp8 on a GPU: an engine with graphs computes what the network with rounded keys and values does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, Runs, ran, start_features

from quantized_cache import COMPRESSED, OPERATORS, PLAIN, Cache
from quantized_network import answered, distance

pytestmark = pytest.mark.gpu
SAMPLING = {"max_tokens": MAX_TOKENS, "logprobs": 0}
ASKED: Mapping[str, Any] = {"do": "generate", "prompts": PROMPTS, "sampling": {**SAMPLING, "prompt_logprobs": 0}}
AGAIN: Mapping[str, Any] = {"do": "generate", "prompts": PROMPTS, "sampling": SAMPLING}
"""Prompts whose log-probabilities are asked for are computed anew; these are found."""
GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20}
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
VENDORS = {"VLLM_FL_PREFER": "vendor", "USE_FLAGGEMS": "0"}


class Run(NamedTuple):
    """An engine with such a cache: the checkpoint's scales, further arguments of ``LLM``, and variables."""

    cache: Cache
    engine: Mapping[str, Any]
    variables: Mapping[str, str]


ONES, SCALED, HALF = "scales of 1", "a checkpoint's scales", "bfloat16, FlashAttention preferred"
RUNS = {
    ONES: Run(PLAIN, {"kv_cache_dtype": "fp8"}, OURS),
    SCALED: Run(COMPRESSED, {}, OURS),
    HALF: Run(PLAIN, {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}, VENDORS),
}
each = pytest.mark.parametrize("name", RUNS)
single = pytest.mark.parametrize("name", [ONES, SCALED])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("cache")

    def start(run: Run, place: int) -> Any:
        checkpoint = run.cache.checkpoint(folder / str(place))
        return start_features((checkpoint, [ASKED, AGAIN], {**GRAPHS, **run.engine}), **run.variables)

    return Runs({name: start(run, place) for place, (name, run) in enumerate(RUNS.items())})


@single
def test_it_computes_what_the_network_with_rounded_keys_and_values_does(name: str, answers: Runs) -> None:
    cache = RUNS[name].cache
    texts, got = answered(PROMPTS, answers[name]["runs"][0]["steps"][0])
    there = cache.computed(texts)
    assert distance(got, there.scores) <= there.rounding
    assert there.decides(PROMPTS, MAX_TOKENS)
    for other, error in cache.distances_of_others(texts, got).items():
        assert error > there.rounding, other


def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(answers: Runs) -> None:
    assert RUNS[HALF].cache.is_as_near_in_bfloat16(*answered(PROMPTS, answers[HALF]["runs"][0]["steps"][0]))


@single
def test_a_prompt_found_in_the_cache_has_an_answer_that_the_network_gives(name: str, answers: Runs) -> None:
    """Another batch may round an element of a key the other way, so tokens are compared with the network's."""
    again = answers[name]["runs"][0]["steps"][1]
    assert max(one["cached"] for one in again) >= 320
    texts = [[*prompt, *one["tokens"][0]] for prompt, one in zip(PROMPTS, again, strict=True)]
    assert RUNS[name].cache.computed(texts).decides(PROMPTS, MAX_TOKENS)


@each
def test_our_kernels_serve_it_whoever_is_preferred(name: str, answers: Runs) -> None:
    """FlashAttention 3 would quantize the queries, too, and vLLM's write takes its scales from the device."""
    (run,) = answers[name]["runs"]
    assert all(ran(run, operator) == {"default.triton"} for operator in OPERATORS)
    assert run["report"]["native_layers"] == {}
    assert run["report"]["failed"] == {}
    assert run["report"]["compiled"]["mode"] == "VLLM_COMPILE"
