"""Processes of a host: which of them is its command, and which a child, as a plugin is asked in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, sys
from types import SimpleNamespace
from fl_dispatch import ConfigError
from fl_dispatch.hosting.start.startup import Startup, is_child, runs_command
from fl_dispatch.settings import get_settings, reset_settings

COMMANDS = ("engine.command",)
HOST = SimpleNamespace(name="engine", layers=SimpleNamespace(names=()))

def show(when):
    reset_settings()
    with Startup("plugin", HOST, "group", "ENGINE_PLUGINS=fl").reading():
        get_settings()
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


def _run(folder: Path, *arguments: str, **variables: str) -> tuple[list[str], str, int]:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(folder), **variables},
    )
    return ended.stdout.splitlines(), ended.stderr, ended.returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host: its command as a module and as a script, and another program."""
    folder = tmp_path_factory.mktemp("host")
    package, script, others = folder / "engine", folder / "bin/engine", folder / "others.py"
    for made in (package, script.parent, folder / "engine-1.dist-info"):
        made.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM)
    for file in (package / "command.py", script, others):
        file.write_text(COMMAND)
    (folder / "engine-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1\n")
    (folder / "engine-1.dist-info/entry_points.txt").write_text(ENTRY)
    return folder


CHILD = ["unpickling False True", "running False True"]


@pytest.mark.parametrize("command", [("-m", "engine.command"), ("bin/engine",)])
def test_a_hosts_command_ends_with_one_line(command: tuple[str, ...], folder: Path) -> None:
    """Its children, which unpickle first, are no commands."""
    says = "plugin: error: environment variable X: is wrong\n"
    assert _run(folder, *command, "mine") == (["mine True False", *CHILD], says, 1)


def test_another_program_gets_the_error_and_its_children_repeat_no_warning_of_settings(folder: Path) -> None:
    output, errors, status = _run(folder, "others.py", "mine", VLLM_FL_WIBBLE="1")
    assert (output, status) == (["mine False False", *CHILD, "raised"], 0)
    assert [line.split()[0] for line in errors.splitlines() if "VLLM_FL_WIBBLE" in line] == ["WARNING"]
