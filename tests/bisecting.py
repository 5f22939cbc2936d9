"""``fl bisect --self-test`` in a real engine of either host: what is planted is found, and nothing else is blamed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping

import processes
from fl_dispatch.cli.bisect.selftest import TESTS

BLIND = {"float32": 0.1, "bfloat16": 20.0}
"""The largest yardstick, in logits of which the small model's are 80 apart: above it a fault could hide."""


def check(host: str, fault: str, environment: Mapping[str, str], *arguments: str) -> None:
    """Run the self-test of one fault, with further arguments of the command."""
    command = (
        "-c",
        "from fl_dispatch.cli import main; main()",
        "bisect",
        "--host",
        host,
        "--self-test",
        fault,
        "--json",
        *arguments,
    )
    with tempfile.TemporaryFile() as errors:
        ended = processes.python(*command, environment=environment, timeout=900, errors=errors)
        errors.seek(0)
        assert ended.returncode == 0, ended.log[-4000:] + errors.read().decode()[-4000:]
    (found,) = json.loads(ended.log[ended.log.index("[") :])
    assert found["right"]
    assert found["differs"] == bool(TESTS[fault].op)
    assert found["yardstick"]["largest"] < BLIND[TESTS[fault].dtype]
