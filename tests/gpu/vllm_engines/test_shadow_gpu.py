"""Shadow mode in an engine with captured graphs on a GPU: one step in N runs eagerly, and a wrong operator is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, expected_tokens, start

from fl_dispatch.cli.checkpoints import build_checkpoint
from fl_dispatch.hosting.records.runs import recorded

pytestmark = pytest.mark.gpu
GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
SHADOW = {"VLLM_FL_SHADOW_SHARE": "0.2", "VLLM_FL_SHADOW_BUDGET": "1", "VLLM_FL_SHADOW_ACTION": "ban"}
WRONG = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_PER_OP": "silu_and_mul=vendor:wrong|reference"}
FOUND = re.compile(r"shadow: '(\w+)' by '(\S+)' differs .* in (\S+)\); (.*)")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_checkpoint(family, folder / family))


def test_a_wrong_operator_behind_captured_graphs_is_found(checkpoint: Callable[[str], Path]) -> None:
    answer = start(checkpoint("qwen3"), engine=GRAPHS, variables={**WRONG, **SHADOW}).result()
    found = FOUND.findall(answer["log"])
    assert "silu_and_mul" in {operator for operator, *_ in found}
    assert {impl_id for _, impl_id, *_ in found} == {"vendor.wrong"}
    held = "it goes on, because compiled code or a captured graph holds this choice"
    before = "it is banned for these arguments"  # found while batches warm up, before anything holds the choice
    outcomes = {outcome.strip() for *_, outcome in found}
    assert held in outcomes
    assert outcomes <= {held, before}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v2"])
def test_kernels_that_are_right_are_compared_and_none_is_blamed(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    variables = {**SHADOW, "XDG_STATE_HOME": str(tmp_path)}
    answer = start(checkpoint(family), STEP, STEP, engine=GRAPHS, variables=variables).result()
    expected = expected_tokens(checkpoint(family))
    assert [step["tokens"] for step in answer["steps"]] == [expected, expected]
    (run,) = recorded(tmp_path / "fl_dispatch" / "runs")
    shadow = run.choices["shadow"]
    assert sum(shadow["compared"].values()) > 0
    assert shadow["findings"] == []
