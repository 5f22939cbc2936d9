"""In a compiled engine, whose calls are traced, shadow mode sees those of one step in N that runs eagerly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from engines import start

from fl_dispatch.hosting.records.runs import recorded

COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}
VARIABLES = {
    "VLLM_FL_PLUGIN_MODULES": "wrong_plugin",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:wrong|reference",
    "VLLM_FL_SHADOW_SHARE": "0.2",
    "VLLM_FL_SHADOW_BUDGET": "1",
    "VLLM_FL_SHADOW_ACTION": "ban",
}


def test_a_wrong_operator_of_a_compiled_engine_is_found_in_steps_that_run_eagerly(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    variables = {**VARIABLES, "XDG_STATE_HOME": str(tmp_path)}
    answer = start(checkpoint("qwen3"), engine=COMPILED, variables=variables).result()
    found = re.findall(r"shadow: 'silu_and_mul' by 'vendor.wrong' differs .* in (\S+)\); (.*)", answer["log"])
    assert found
    assert len({layer for layer, _ in found}) == len(found)
    reason = "it goes on, because compiled code or a captured graph holds this choice"
    assert {outcome.strip() for _, outcome in found} == {reason}
    named = re.findall(r"keys and values of (.*), which differed and stays in service: (.+); later", answer["log"])
    assert sum("'silu_and_mul' by 'vendor.wrong'" in wrong for wrong, _ in named) == 1
    (run,) = recorded(tmp_path / "fl_dispatch" / "runs")
    assert run.sizes["compiled"]
