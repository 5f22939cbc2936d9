"""Interpreters that have not imported this project yet."""

from __future__ import annotations

from pathlib import Path

import processes
import vllm_fl

SOURCES = Path(vllm_fl.__file__).parents[1]


def fresh(code: str, *arguments: str, cold: bool = False) -> str:
    """Return the output of an interpreter that has not imported this project; ``cold``: that has imported nothing."""
    given = arguments or ("-c", code)
    done = processes.python(
        *given, environment={"PYTHONPATH": str(SOURCES), "HOME": "/nonexistent"}, timeout=120, cold=cold
    )
    assert done.returncode == 0, done.log
    return done.log
