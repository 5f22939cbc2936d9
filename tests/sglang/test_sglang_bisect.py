"""``fl bisect`` finds what is planted in a real SGLang: one that the commit draws, in ``make test-all`` each."""

from __future__ import annotations

import json
import tempfile

import pytest
import serving

import processes
from fl_dispatch.cli.bisect.selftest import TESTS
from sampling import drawn

pytestmark = pytest.mark.engine

SHOWN = ("bfloat16_only-float32",)
"""Those that were seen to be found, or rightly not blamed; docs/bisect.md has the others."""
FAULTS = drawn(SHOWN, 1, "planted faults, SGLang")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else_is_blamed(name: str) -> None:
    command = (
        "-c",
        "from fl_dispatch.cli import main; main()",
        "bisect",
        "--host",
        "sglang",
        "--self-test",
        name,
        "--json",
    )
    with tempfile.TemporaryFile() as errors:
        ended = processes.python(*command, environment=serving.environment(), timeout=900, errors=errors)
        errors.seek(0)
        assert ended.returncode == 0, ended.log[-4000:] + errors.read().decode()[-4000:]
    (found,) = json.loads(ended.log[ended.log.index("[") :])
    assert found["right"]
    assert found["differs"] == bool(TESTS[name].op)
    assert found["yardstick"]["largest"] < 5  # else a fault could hide
