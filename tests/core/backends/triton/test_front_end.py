"""Triton's compiler reads every kernel: its interpreter also takes code that the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_compiler_reads_every_kernel_that_inputs_launch(tmp_path: Path) -> None:
    """Such as one whose variable changes its type in a loop."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(Path(__file__).with_name("front_end.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    read, existing, refused = json.loads(done.stdout.splitlines()[-1])
    assert refused == []
    assert read == existing
