"""``fl bisect --self-test`` in a real engine of either host finds the planted fault and blames nothing else."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import processes
from fl_dispatch.cli.bisect.selftest import TESTS
from host_engines import Programs, Scenario

BLIND = {"float32": 0.1, "bfloat16": 20.0}
"""The largest yardstick in logits, which are 80 apart in the small model: a larger one could hide a fault."""


SHOWN = (
    "one_shape",
    "bfloat16_only",
    "bfloat16_only-float32",
    "beyond_256",
    "leftover",
    "one_rank",
    "dies",
    "not_exact",
)
"""Faults that a run found, or rightly did not blame, under each host; docs/guide/commands/bisect.md lists others.
"""
OF_ATEN = tuple(name for name in TESTS if TESTS[name].aten and not TESTS[name].slower_than)
"""Faults of a backend that replaces PyTorch's own operators."""
SLOW = tuple(name for name in TESTS if TESTS[name].slower_than)
"""Implementations that are right, and slow."""


class PlantedFaults(Scenario):
    """``fl bisect --self-test`` finds the planted fault in a real engine and blames nothing else."""

    FAULTS: ClassVar[Sequence[str]]

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"fault": self.FAULTS}

    def arguments(self, fault: str) -> Sequence[str]:
        """Return further arguments of the command."""
        return ()

    def test_a_planted_fault_is_found_and_nothing_else_is_blamed(self, fault: str, host: Programs) -> None:
        arguments = ("--host", host.name, "--self-test", fault, *self.arguments(fault))
        ended, (found,) = run(host.environment(), *arguments)
        assert ended == 0, found
        assert found["right"]
        assert found["differs"] == bool(TESTS[fault].op or TESTS[fault].aten)
        assert found["yardstick"]["largest"] < BLIND[TESTS[fault].dtype]


def run(environment: Mapping[str, str], *arguments: str) -> tuple[int, Any]:
    """Return the exit status of ``fl bisect``, and its JSON."""
    command = ("-c", "from fl_dispatch.cli import main; main()", "bisect", "--json", *arguments)
    with tempfile.TemporaryFile() as errors:
        ended = processes.python(*command, environment=environment, timeout=900, errors=errors)
        errors.seek(0)
        begins = re.search(r"^[\[{]", ended.log, re.MULTILINE)
        assert begins, ended.log[-4000:] + errors.read().decode()[-4000:]
    return ended.returncode, json.loads(ended.log[begins.start() :])
