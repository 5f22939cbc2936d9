"""Random calls of this project's native code, under the sanitizers of addresses and of undefined behaviour."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import native_fuzz
from fl_dispatch.backends.vendor.cpu.impl.own_attention import why_unavailable
from sampling import ALL, seed

SAMPLE, EXHAUSTIVE = 10.0, 180.0
"""Seconds of random calls in ``make test``, and in ``make test-all``; compiling takes longer."""


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.skipif(shutil.which("nm") is None or shutil.which("g++") is None, reason="needs g++ and nm")
def test_no_call_of_a_native_entry_reads_or_writes_outside_of_its_tensors(tmp_path: Path) -> None:
    seconds = EXHAUSTIVE if seed() == ALL else SAMPLE
    found = native_fuzz.run(seconds, seed(), tmp_path)
    assert found["wrong"] == []
    assert found["called"] == found["exported"], "a function that no entry of the fuzz reaches"
    for name, answers in found["entries"].items():
        assert answers.get("done"), f"{name} took no call: {json.dumps(answers)}"
        assert len(answers) > 1, f"{name} declined no call"
