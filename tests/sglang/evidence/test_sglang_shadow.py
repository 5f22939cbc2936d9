"""Shadow mode in a real SGLang: a wrong operator is found, taken out and reported; what it made is computed again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import STEP, python, start

from fl_dispatch.hosting.damage.verdicts import of_wrong
from fl_dispatch.hosting.records.runs import PAUSE
from running import MAX_TOKENS, PROMPTS

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
    shares = [*PROMPTS[2][:128], *PROMPTS[0]]  # it begins with the part in which the fault is found
    both = {"prompts": [PROMPTS[2], shares], "max_tokens": MAX_TOKENS, "apart": True}
    steps = (both, both, STEP)
    answer = start(checkpoint("qwen3"), *steps, engine=engine, variables=variables, linger=2 * PAUSE).result()
    first, again, whole = answer["steps"]
    assert first["answers"][0] == expected("qwen3")[2]
    assert first["answers"] == again["answers"]
    assert whole["tokens"] == expected("qwen3")
    assert "requests with keys and values of an implementation that was wrong: " in answer["log"]
    told = re.findall(r"shadow: 'silu_and_mul' by 'vendor.long' .* in (\S+)\); it is banned", answer["log"])
    assert len(told) == len(set(told)) == answer["log"].count("shadow: ") == 3, told
    page = tmp_path / "report.html"
    made = python("-c", "from fl_dispatch.cli import main; main()", "report", "--out", str(page), XDG_STATE_HOME=state)
    assert "Shadow: 1 implementation differed, in 3 of " in made.log
    assert "vendor.long" in page.read_text()


def test_a_request_that_a_wrong_operator_touched_ends_with_the_reason_and_others_go_on(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    """The fault is found in the first of three parts of the long prompt, which is in the radix cache by then."""
    right = expected("qwen3")
    long = max(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
    others = [row for row in range(len(PROMPTS)) if row != long]
    together = [PROMPTS[long], *(PROMPTS[row] for row in others)]
    engine = {"chunked_prefill_size": 128, "max_running_requests": 1}  # the others run when the long one has ended
    again = {"prompts": [PROMPTS[long]], "max_tokens": MAX_TOKENS}
    apart = {"prompts": together, "max_tokens": MAX_TOKENS, "apart": True}
    variables = {**VARIABLES, "VLLM_FL_DAMAGED_REQUESTS": "end"}
    answer = start(checkpoint("qwen3"), apart, again, again, engine=engine, variables=variables).result()
    first, *fresh = answer["steps"]
    assert of_wrong(["'silu_and_mul' by 'vendor.long'"]) in first["answers"][0]
    assert first["answers"][1:] == [right[row] for row in others]
    assert len(re.findall(r"an implementation that was wrong: \w+\n", answer["log"])) == 1
    assert [step["tokens"] for step in fresh] == [[right[long]]] * 2
    cached = [step["cached"][0] for step in fresh]
    assert cached[0] == 0 < cached[1]
