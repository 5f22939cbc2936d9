"""Ranks divide a KV cache by tokens (decode context parallelism), and give Hugging Face's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, STEP, expected_tokens, ran, start

from fl_dispatch.cli.checkpoints import build_checkpoint
from sampling import drawn

RANKS = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
INTERLEAVED = drawn((1, 4), 1, "tokens of a rank in turn")[0]
BLOCK = 16


MODELS: Mapping[str, Mapping[str, Any]] = {"qwen3": {"num_key_value_heads": 1}, "deepseek_v2": {}}
"""Models with keys that every rank would have whole: one head, or latent rows."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp("divided") / request.param, **MODELS[request.param])


@pytest.fixture(scope="module")
def result(model: Path) -> dict[str, Any]:
    engine = {**RANKS, "cp_kv_cache_interleave_size": INTERLEAVED, "num_gpu_blocks_override": 40, "block_size": BLOCK}
    found: dict[str, Any] = start(model, STEP, STEP, engine=engine).result()
    return found


def test_tokens_equal_hugging_faces_in_chunks_and_from_the_prefix_cache(model: Path, result: dict[str, Any]) -> None:
    expected = expected_tokens(model)
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]


def test_a_block_has_the_tokens_of_both_ranks(result: dict[str, Any]) -> None:
    both = 2 * BLOCK
    assert result["steps"][1]["cached"] == [(len(prompt) - 1) // both * both for prompt in PROMPTS]
    assert f"{40 * both:,} tokens" in result["log"]


def test_each_rank_attends_to_its_part_and_they_merge_what_they_found(result: dict[str, Any]) -> None:
    assert ran(result, "mla_prefill")
    assert not ran(result, "paged_attention")
    assert not ran(result, "mla_decode")
    for report in result["reports"]:
        assert report["communication"]["dcp:0"]["reduce_scatter"] > 0
        assert (report["model_runner"], report["native_layers"], report["failed"]) == ("V2", {}, {})
