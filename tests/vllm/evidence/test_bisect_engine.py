"""``fl bisect`` finds what is planted in a real vLLM: one that the commit draws, in ``make test-all`` each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import bisecting
from fl_dispatch.cli.bisect.selftest import DENSE, PLUGIN, TESTS
from fl_dispatch.evidence.bisect import planted
from fl_dispatch.evidence.bisect.documents import text
from host_engines import Programs
from sampling import drawn

pytestmark = pytest.mark.engine

SHOWN = (*bisecting.SHOWN, "not_exact-bfloat16", "beyond_256-compiled")
COMPILED = '{"mode": 3, "backend": "eager"}'
"""Traced and frozen as ever, and not handed to Inductor, which takes longer at each start."""


class TestFaults(bisecting.PlantedFaults):
    FAULTS = (
        *drawn(SHOWN, 1, "planted faults"),
        *drawn(bisecting.OF_ATEN, 1, "planted faults of ATen"),
        *drawn(bisecting.SLOW, 1, "planted slow"),
    )

    def arguments(self, fault: str) -> Sequence[str]:
        return ("--engine-arg", f"compilation_config={COMPILED}") if TESTS[fault].compiled else ()


@pytest.mark.parametrize("fault", drawn(("beyond_256", "not_exact"), 1, "against Hugging Face"))
def test_against_hugging_face_what_is_wrong_is_found_and_what_is_right_is_not_blamed(
    fault: str, host: Programs, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(text(planted.policy(fault, DENSE)))
    variables = host.environment(VLLM_FL_PLUGIN_MODULES=PLUGIN)
    arguments = ("--model", str(checkpoint("qwen3")), "--dtype", "float32", "--policy", str(policy))
    status, found = bisecting.run(variables, "--host", "vllm", *arguments, "--against", "huggingface")
    blamed = [one["op"] for one in found["blamed"]]
    assert (status, blamed) == ((1, ["silu_and_mul"]) if fault == "beyond_256" else (0, []))
    assert 0 < found["huggingface"] < 1  # yardsticks; the engine under references is no copy of it
