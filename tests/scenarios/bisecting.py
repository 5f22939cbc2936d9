"""``fl bisect --self-test`` in a real engine of either host: what is planted is found, and nothing else is blamed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import processes
from fl_dispatch.cli.bisect.selftest import TESTS

BLIND = {"float32": 0.1, "bfloat16": 20.0}
"""The largest yardstick, in logits of which the small model's are 80 apart: above it a fault could hide."""


def check(host: str, fault: str, environment: Mapping[str, str], *arguments: str) -> None:
    """Run the self-test of one fault, with further arguments of the command."""
    ended, (found,) = run(environment, "--host", host, "--self-test", fault, *arguments)
    assert ended == 0, found
    assert found["right"]
    assert found["differs"] == bool(TESTS[fault].op)
    assert found["yardstick"]["largest"] < BLIND[TESTS[fault].dtype]


def run(environment: Mapping[str, str], *arguments: str) -> tuple[int, Any]:
    """The exit status of ``fl bisect``, and what it prints for programs."""
    command = ("-c", "from fl_dispatch.cli import main; main()", "bisect", "--json", *arguments)
    with tempfile.TemporaryFile() as errors:
        ended = processes.python(*command, environment=environment, timeout=900, errors=errors)
        errors.seek(0)
        begins = re.search(r"^[\[{]", ended.log, re.MULTILINE)
        assert begins, ended.log[-4000:] + errors.read().decode()[-4000:]
    return ended.returncode, json.loads(ended.log[begins.start() :])
