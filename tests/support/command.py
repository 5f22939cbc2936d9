"""The command ``fl`` in a separate process."""

from __future__ import annotations

import os
import subprocess
import tempfile

import processes


def fl(*arguments: str, cold: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process; ``cold``: a newly started Python, as users have it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_FL_")}
    command = ["-c", "from fl_dispatch.cli import main; main()", *arguments]
    with tempfile.TemporaryFile() as errors:
        ended = processes.python(*command, environment={**clean, **environment}, cold=cold, errors=errors)
        errors.seek(0)
        return subprocess.CompletedProcess(command, ended.returncode, ended.log, errors.read().decode())
