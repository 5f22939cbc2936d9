"""The end of a program that had an engine of SGLang's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, multiprocessing, os, sys
from sglang.srt.utils import kill_process_tree
from fl_dispatch.cli.engines.sglang import end

class Engine:
    def __init__(self):
        self.lock = multiprocessing.get_context("spawn").Lock()
        atexit.register(self.shutdown)

    def shutdown(self):
        kill_process_tree(os.getpid(), include_parent=False)

engine = Engine()
ended = {"ours": end, "its own": Engine.shutdown}[sys.argv[1]]
terminal = os.dup(2)
os.dup2(os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY), 2)
ended(engine)
os.dup2(terminal, 2)
print("the command's last line", file=sys.stderr)
"""


def test_nothing_follows_a_commands_last_line(tmp_path: Path) -> None:
    """SGLang's way to end its children leaves a traceback; with ours it goes to the log of the engine."""
    log = tmp_path / "log"
    errors = {
        how: subprocess.run(
            [sys.executable, "-c", PROGRAM, how, log], check=True, capture_output=True, text=True
        ).stderr.partition("the command's last line\n")[2]
        for how in ("its own", "ours")
    }
    assert "KeyError" in errors["its own"]
    assert errors["ours"] == ""
    assert "KeyError" in log.read_text()
