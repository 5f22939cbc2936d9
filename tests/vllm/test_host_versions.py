"""Other versions of vLLM, as Python files over the tested environment: some models run with right tokens.

Smoke tests: eagerly, in one process, without any compiled library, and on the PyTorch of the tested version.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import OTHER_HOSTS, PROMPTS, STEP, UNPACKED, ran, start, unpacked

from vllm_fl.compat import versions

VERSIONS = [version for version in UNPACKED if f"vLLM {version}" in OTHER_HOSTS]
OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")
LATENT = {"0.26": ("deepseek_v2", "deepseek_v3"), "0.33": ("deepseek_v2",)}
LATENT_RUNS = [(version, family) for version in VERSIONS for family in LATENT[version]]
LATENT_OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill", "grouped_topk", "fused_moe")


@pytest.fixture(scope="session")
def runs(checkpoint: Callable[[str], Path]) -> dict[tuple[str, str], Future[Any]]:
    """An engine for each model on each version that ``make hosts`` has unpacked; the prompts run twice."""
    wanted = [*((version, "qwen3") for version in VERSIONS), *LATENT_RUNS]
    return {
        (version, family): start(checkpoint(family), STEP, STEP, variables=unpacked(version))
        for version, family in wanted
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tokens_are_right_and_ours(
    version: str, runs: dict[tuple[str, str], Future[Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[version, "qwen3"].result()
    assert result["steps"][0]["tokens"] == expected("qwen3")
    assert all(ran(result, operator) for operator in OPERATORS)
    assert result["report"]["native_layers"] == {}
    warning = f"vLLM {version} is only smoke-tested (tested: {', '.join(versions.TESTED_HOSTS)}): all "
    smoke_tested = version in versions.SMOKE_TESTED_HOSTS
    assert (warning in result["log"]) is smoke_tested
    assert ("names that are relied on are there" in result["log"]) is smoke_tested


@pytest.mark.parametrize(("version", "family"), LATENT_RUNS)
def test_latent_attention_gives_the_same_tokens_in_chunks_and_from_the_prefix_cache(
    version: str,
    family: str,
    runs: dict[tuple[str, str], Future[Any]],
    expected: Callable[[str], list[list[int]]],
) -> None:
    result = runs[version, family].result()
    first, again = result["steps"]
    assert first["cached"] == [0] * len(PROMPTS)
    assert again["cached"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert first["tokens"] == again["tokens"] == expected(family)
    assert all(ran(result, operator) for operator in LATENT_OPERATORS)
    assert result["report"]["attention"] == {"MLAFLImpl": 3}
    assert result["report"]["native_layers"] == {}


def test_a_version_is_tested_or_smoke_tested_and_these_are_all() -> None:
    assert set(UNPACKED) <= {*versions.SMOKE_TESTED_HOSTS, *versions.TESTED_HOSTS}
    assert set(versions.SMOKE_TESTED_HOSTS) <= set(UNPACKED)
    assert not set(versions.SMOKE_TESTED_HOSTS) & set(versions.TESTED_HOSTS)
