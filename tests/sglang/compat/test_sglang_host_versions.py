"""An older SGLang, as Python files over the tested environment: models run with right tokens.

Smoke tests: without SGLang's compiled libraries, and on the PyTorch and transformers of the tested version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from serving import environment, start

from processes import Runs
from running import ran
from sampling import drawn
from sglang_fl.version import SMOKE_TESTED_HOSTS, TESTED_HOSTS

HOSTS = Path(__file__).parents[3] / ".venv-hosts"
(VERSION,) = SMOKE_TESTED_HOSTS
OPERATORS = {
    "qwen3": ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention", "linear"),
    "qwen3_moe": ("rms_norm", "topk_softmax", "fused_moe", "paged_attention"),
    "deepseek_v3": ("rms_norm", "grouped_topk", "fused_moe", "mla_decode"),
}
FAMILIES = drawn(tuple(OPERATORS), 1, "families of an older SGLang")


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    """An engine for each family."""
    folder = HOSTS / f"sglang-{VERSION}"
    if not folder.exists():
        pytest.skip(f"SGLang {VERSION} is not unpacked: make hosts")
    path = os.pathsep.join((str(folder), environment()["PYTHONPATH"]))
    return Runs({family: start(checkpoint(family), variables={"PYTHONPATH": path}, cold=True) for family in FAMILIES})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_right_and_ours(
    family: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results[family]
    assert result["steps"][0]["tokens"] == expected(family)
    assert all(ran(result, operator) for operator in OPERATORS[family])
    assert result["report"]["native_layers"] == {}
    assert f"SGLang {VERSION} is only smoke-tested (tested: {', '.join(TESTED_HOSTS)})" in result["log"]
