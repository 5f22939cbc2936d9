"""``VLLM_BATCH_INVARIANT=1``: a prompt's tokens and log-probabilities are the same alone and in every batch.

Prompts are cut into chunks (64 tokens fit a step), join others at any step, and are read from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import RUNNERS, ran, start_script
from engines import engine_arguments as arguments

from invariance import PROMPTS, different

ASKED = {"VLLM_BATCH_INVARIANT": "1"}
V1 = RUNNERS["V1"]
COMPILED = {"enforce_eager": False}
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "float32, eager": ("qwen3", {}, ASKED),
    "bfloat16, eager": ("qwen3", {"dtype": "bfloat16"}, ASKED),
    "bfloat16, compiled": ("llama", {"dtype": "bfloat16", **COMPILED}, ASKED),
    "float32, compiled": ("qwen2", COMPILED, ASKED),
    "float32, V1 runner": ("llama", {}, {**ASKED, **V1}),
    "experts, bfloat16": ("qwen3_moe", {"dtype": "bfloat16"}, ASKED),
    "gemma, float32": ("gemma2", {}, ASKED),
    "nothing asked": ("qwen3", {}, {"VLLM_FL_PER_OP": "paged_attention=reference"}),
}
"""Name → checkpoint, arguments of ``LLM``, variables. The V1 runner cannot draw with a seed on a CPU."""


@pytest.fixture(scope="module")
def engines(checkpoint: Any) -> dict[str, Future[dict[str, Any]]]:
    """All engines at once, in the pool's turns."""
    started = {}
    for name, (family, engine, variables) in RUNS.items():
        model: Path = checkpoint(family)
        drawn = variables != {**ASKED, **V1}
        job = {"engine": arguments(model, {"max_num_seqs": 6, **engine}), "max_tokens": 6, "drawn": drawn}
        started[name] = start_script("run_invariant.py", {**job, "prompts": PROMPTS}, **variables)
    return started


@pytest.mark.parametrize("name", [name for name in RUNS if name != "nothing asked"])
def test_a_prompt_has_the_same_bits_alone_and_in_every_batch(
    name: str, engines: Mapping[str, Future[dict[str, Any]]]
) -> None:
    answered = engines[name].result()
    assert different(answered["ways"]) == []
    assert answered["cached"] > 0
    report = answered["report"]
    assert report["failed"] == {}
    assert report["native_layers"] == {}
    chosen = {impl_id for key in report["counts"] for impl_id in [key.split(" ")[1]]}
    assert chosen <= {"reference.invariant", "reference.torch", "default.fl", "vendor.cpu.cpp"}
    assert ran(answered, "linear") == {"reference.invariant"} or not answered["report"]["counts"]


def test_without_it_the_same_prompts_differ(engines: Mapping[str, Future[dict[str, Any]]]) -> None:
    assert different(engines["nothing asked"].result()["ways"]) != []
