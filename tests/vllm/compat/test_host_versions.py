"""Other versions of vLLM, as Python files over the tested environment: some models run with right tokens.

Smoke tests: eagerly, in one process, without any compiled library, and on the PyTorch of the tested version.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import OTHER_HOSTS, PROMPTS, STEP, ran, start, unpacked

from host_files import UNPACKED
from vllm_fl.compat import versions
from vllm_fl.platform import startup

VERSIONS = [version for version in UNPACKED if f"vLLM {version}" in OTHER_HOSTS]
OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
FAMILIES = ("qwen3", "deepseek_v2", *SPARSE)
LATENT_OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill", "grouped_topk", "fused_moe")


@pytest.fixture(scope="session")
def runs(checkpoint: Callable[[str], Path]) -> dict[tuple[str, str], Future[Any]]:
    """An engine for each model on each version that ``make hosts`` has unpacked; the prompts run twice."""
    return {
        (version, family): start(checkpoint(family), STEP, STEP, variables=unpacked(version))
        for version in VERSIONS
        for family in FAMILIES
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tokens_are_right_and_ours(
    version: str, runs: dict[tuple[str, str], Future[Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[version, "qwen3"].result()
    assert result["steps"][0]["tokens"] == expected("qwen3")
    assert all(ran(result, operator) for operator in OPERATORS)
    assert result["report"]["native_layers"] == {}
    assert f"vLLM {version} is" not in result["log"]  # a tested version is warned of nothing


@pytest.mark.parametrize("version", VERSIONS)
def test_latent_attention_gives_the_same_tokens_in_chunks_and_from_the_prefix_cache(
    version: str, runs: dict[tuple[str, str], Future[Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[version, "deepseek_v2"].result()
    first, again = result["steps"]
    assert first["cached"] == [0] * len(PROMPTS)
    assert again["cached"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert first["tokens"] == again["tokens"] == expected("deepseek_v2")
    assert all(ran(result, operator) for operator in LATENT_OPERATORS)
    assert result["report"]["attention"] == {"MLAFLImpl": 3}
    assert result["report"]["native_layers"] == {}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("family", SPARSE)
def test_sparse_latent_attention_gives_the_same_tokens(
    family: str, version: str, runs: dict[tuple[str, str], Future[Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[version, family].result()
    assert [step["tokens"] for step in result["steps"]] == [expected(family)] * 2
    assert result["report"]["attention"] == {"SparseMLAFLImpl": 3}
    assert result["report"]["native_layers"] == {}


def test_every_version_that_these_tests_run_is_a_tested_one() -> None:
    assert {*UNPACKED, versions.host_version()} <= set(versions.TESTED_HOSTS)


def test_an_untested_version_is_warned_of_before_anything_that_it_may_lack_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(v2: bool) -> None:
        raise AttributeError("HAS_TRITON")

    monkeypatch.setattr(versions, "host_version", lambda: "0.99")
    monkeypatch.setattr(startup, "warn_of_untested_host", startup.warn_of_untested_host.__wrapped__)
    monkeypatch.setattr(startup, "why_unserved", lambda: "no driver")
    monkeypatch.setattr(startup.model_runner, "do_without_triton", lacking)
    with pytest.raises(AttributeError):
        startup._prepare_host()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("vLLM 0.99 is not a tested version (tested: 0.32, 0.33): ")
