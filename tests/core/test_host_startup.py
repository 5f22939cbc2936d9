"""Processes of a host: which of them is its command, and which a child, as a plugin is asked in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, runpy, sys
from fl_dispatch import ConfigError
from fl_dispatch.hosting.startup import Startup, is_child, runs_command

COMMANDS = ("engine.command",)

def show(when):
    print(when, runs_command(COMMANDS), is_child(), flush=True)

class Argument:
    def __reduce__(self):
        return show, ("unpickling",)

def main():
    show(sys.argv[1])
    child = multiprocessing.get_context("spawn").Process(target=show, args=("running",))
    child.argument = Argument()
    child.start()
    child.join()
    start = Startup("plugin", None, "group", "ENGINE_PLUGINS=fl", COMMANDS)
    try:
        with start.refusing():
            raise ConfigError("environment variable X", None, "is wrong")
    except ConfigError:
        print("raised", flush=True)
"""
COMMAND = "from engine import program\nif __name__ == '__main__':\n    program.main()\n"
ENTRY = "[console_scripts]\nengine = engine.command:main\n"


def _run(folder: Path, *arguments: str) -> tuple[list[str], str, int]:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(folder)},
    )
    return ended.stdout.splitlines(), ended.stderr, ended.returncode


def test_a_hosts_command_ends_with_one_line_and_any_other_program_gets_the_error(tmp_path: Path) -> None:
    """A command is run by its module or by its script; its children, which unpickle first, are none."""
    package, script, others = tmp_path / "engine", tmp_path / "bin/engine", tmp_path / "others.py"
    for folder in (package, script.parent, tmp_path / "engine-1.dist-info"):
        folder.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM)
    for file in (package / "command.py", script, others):
        file.write_text(COMMAND)
    (tmp_path / "engine-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1\n")
    (tmp_path / "engine-1.dist-info/entry_points.txt").write_text(ENTRY)
    child = ["unpickling False True", "running False True"]
    for command in (["-m", "engine.command", "mine"], [str(script), "mine"]):
        assert _run(tmp_path, *command) == (
            ["mine True False", *child],
            "plugin: error: environment variable X: is wrong\n",
            1,
        )
    assert _run(tmp_path, str(others), "mine") == (["mine False False", *child, "raised"], "", 0)
