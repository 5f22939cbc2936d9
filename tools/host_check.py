"""Check whether a version of a host that is not installed still has everything that a plugin uses.

    python tools/host_check.py vllm 0.33.0 [--wheel FILE | --source FOLDER] [--pip PYTHON]

Without a file or a folder the wheel is downloaded. It is read, not installed, so its requirements are not needed. The
first table has the facts that do not hold; each must be resolved before that version is served. The second lists layer
classes that run the host's own code although an operator could replace it, or without a recorded decision; this is no
error.

Exit status: 0, every fact holds; 1, one does not; 2, there is nothing to read.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from unpack_python import unpack

from fl_dispatch.cli.host_contract import PLUGINS, HostContract, compare, host_of
from fl_dispatch.hosting.facts.source import SourceTree


def download(package: str, version: str, folder: Path, python: str) -> Path:
    """Fetch a wheel without its requirements by an interpreter's pip.

    Raises:
        OSError: pip fails; the message is the last line of its errors, or names the newest version.
    """
    command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run([python, "-m", "pip", *command], check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        if found := re.search(r"\(from versions: .*?([^ ,]+)\)", done.stderr):
            raise OSError(f"there is no such version, the newest is {found[1]}")
        raise OSError(f"pip failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def contract(asked: argparse.Namespace, folder: Path, progress: Console) -> HostContract:
    """Read the requested wheel or folder; a terminal shows the progress."""
    host = host_of(asked.package)
    source = asked.source
    with progress.status(f"downloading {asked.package} {asked.version}") as status:
        if source is None:
            wheel = asked.wheel or download(asked.package, asked.version, folder, asked.pip)
            status.update(f"unpacking {wheel.name}")
            unpack(wheel, folder / "unpacked")
            source = folder / "unpacked" / host.package
        status.update(f"comparing {sum(1 for _ in source.rglob('*.py'))} files with what is relied on")
        return compare(host, SourceTree({host.package: source}), asked.version)


def main(arguments: list[str] | None = None) -> int:
    """Run the check and return the exit status (see the module's docstring)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PLUGINS)
    parser.add_argument("version")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--wheel", type=Path, help="the wheel's file")
    given.add_argument("--source", type=Path, help="the package's folder")
    parser.add_argument("--pip", default=sys.executable, help="the interpreter whose pip downloads")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="host-check-") as folder:
        try:
            found = contract(asked, Path(folder), Console(stderr=True))
        except OSError as error:
            print(f"{asked.package} {asked.version} cannot be read: {error}", file=sys.stderr)
            return 2
    found.print(all_facts=False)
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
