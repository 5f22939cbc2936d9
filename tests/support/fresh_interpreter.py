"""Interpreters that have imported nothing of this project yet."""

from __future__ import annotations

from pathlib import Path

import processes
import vllm_fl

SOURCES = Path(vllm_fl.__file__).parents[1]


def fresh(code: str, *arguments: str, cold: bool = False) -> str:
    """The output of an interpreter that has nothing of ours imported yet; ``cold``: nothing at all."""
    given = arguments or ("-c", code)
    done = processes.python(
        *given, environment={"PYTHONPATH": str(SOURCES), "HOME": "/nonexistent"}, timeout=120, cold=cold
    )
    assert done.returncode == 0, done.log
    return done.log
