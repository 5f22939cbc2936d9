"""Other versions of vLLM, as Python files over the tested environment: a model runs with right tokens.

A smoke test: eagerly, in one process, without any compiled library, and on the PyTorch of the tested version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engines import PLUGINS, ran, start

from vllm_fl import compat

HOSTS = Path(__file__).parents[2] / ".venv-hosts"
VERSIONS = {"0.26": "0.26.0", "0.33": "0.33.0"}
OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")


@pytest.fixture(scope="session")
def runs(checkpoint: Callable[[str], Path]) -> dict[str, Future[Any]]:
    """One engine on each version that ``make hosts`` has unpacked."""
    folders = {version: HOSTS / f"vllm-{full}" for version, full in VERSIONS.items()}
    return {
        version: start(checkpoint("qwen3"), variables={"PYTHONPATH": os.pathsep.join((str(folder), str(PLUGINS)))})
        for version, folder in folders.items()
        if folder.exists()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tokens_are_right_and_ours(
    version: str, runs: dict[str, Future[Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    if version not in runs:
        pytest.skip(f"vLLM {version} is not unpacked: make hosts")
    result = runs[version].result()
    assert result["steps"][0]["tokens"] == expected("qwen3")
    assert all(ran(result, operator) for operator in OPERATORS)
    assert result["report"]["native_layers"] == {}
    warning = f"vLLM {version} is only smoke-tested (tested: 0.32): every name that is replaced or relied on is there"
    assert warning in result["log"]


def test_exactly_these_versions_are_called_smoke_tested() -> None:
    assert set(compat.SMOKE_TESTED_HOSTS) == set(VERSIONS)
    assert not set(compat.SMOKE_TESTED_HOSTS) & set(compat.TESTED_HOSTS)
