"""Hugging Face's modules with vLLM's layers in them: vLLM's hardware-agnostic ones have a registry of their own.

Ours are in that one too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import OTHER_HOSTS, STEP, ran, start, unpacked

VERSIONS = ("", *(version for version in ("0.33",) if f"vLLM {version}" in OTHER_HOSTS))
"""The installed vLLM, and Python files of others."""
OPERATORS = ("rms_norm", "silu_and_mul", "kv_cache_write", "paged_attention")


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[[str], Path]) -> dict[str, Future[dict[str, Any]]]:
    """A Llama as Hugging Face's modules, in which vLLM puts its own layers."""
    engine = {"model_impl": "transformers"}
    return {
        version: start(
            checkpoint("llama"), STEP, engine=engine, variables={"VLLM_USE_HW_AGNOSTIC": "1", **unpacked(version)}
        )
        for version in VERSIONS
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_hardware_agnostic_layers_run_through_our_operators(
    version: str, runs: dict[str, Future[dict[str, Any]]], expected: Callable[[str], list[list[int]]]
) -> None:
    result = runs[version].result()
    assert "Using hw-agnostic layer: RMSNorm" in result["log"]
    assert result["steps"][0]["tokens"] == expected("llama")
    assert [operator for operator in OPERATORS if not ran(result, operator)] == []
    assert {"TPAwareRMSNorm", "SiluAndMul"} <= set(result["report"]["layers"])
    assert result["report"]["native_layers"] == {}
