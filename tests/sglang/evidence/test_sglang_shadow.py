"""Shadow mode in a real SGLang: a wrong operator is found, taken out and reported; what it made is computed again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import STEP, python, start

from fl_dispatch.hosting.records.runs import PAUSE

pytestmark = pytest.mark.engine

VARIABLES = {
    "VLLM_FL_PLUGIN_MODULES": "long_wrong",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:long|reference",
    "VLLM_FL_SHADOW_SHARE": "1",
    "VLLM_FL_SHADOW_BUDGET": "1",
    "VLLM_FL_SHADOW_ACTION": "ban",
}


def test_a_wrong_operator_is_found_taken_out_and_reported(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    engine = {"chunked_prefill_size": 128}  # more than the 64 tokens for which the operator is right
    state = str(tmp_path / "state")
    variables = {**VARIABLES, "XDG_STATE_HOME": state}
    answer = start(checkpoint("qwen3"), STEP, STEP, engine=engine, variables=variables, linger=2 * PAUSE).result()
    assert [step["tokens"] for step in answer["steps"]] == [expected("qwen3")] * 2
    assert "requests with keys and values of an implementation that was wrong: " in answer["log"]
    told = re.findall(r"shadow: 'silu_and_mul' by 'vendor.long' .* in (\S+)\); it is banned", answer["log"])
    assert len(told) == len(set(told)) == answer["log"].count("shadow: ") == 3, told
    page = tmp_path / "report.html"
    made = python("-c", "from fl_dispatch.cli import main; main()", "report", "--out", str(page), XDG_STATE_HOME=state)
    assert "Shadow: 1 implementation differed, in 3 of " in made.log
    assert "vendor.long" in page.read_text()
