"""A vendor's machine: environments over this checkout's, into which a package can really be installed.

Each is a virtual environment of its own that sees the packages of ``.venv`` or ``.venv-sglang``; nothing is written
there. Its ``pip`` is uv without network, because requirements are there already.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = {"vllm": ".venv", "sglang": ".venv-sglang"}

PIP = """#!/bin/sh
# pip install, in both environments
test "$1" = install || exit 2
shift
for python in {pythons}; do
    {uv} pip install --quiet --offline --no-deps --no-build-isolation --python $python "$@" || exit 1
done
"""
FL = """#!/bin/sh
case " $* " in *" --host sglang "*) set -- {sglang} "$@" ;; *) set -- {vllm} "$@" ;; esac
exec "$1" -c 'from fl_dispatch.cli import main; main()' "${{@:2}}"
"""
PYTEST = '#!/bin/sh\nexec {vllm} -m pytest "$@"\n'


@dataclass
class Machine:
    """A folder with the environments, and the directory that commands run in."""

    folder: Path
    directory: Path

    def run(self, commands: str, timeout: float = 600) -> str:
        """Run lines of a shell, as a user who has the environments on the path; what they print, both streams.

        Raises:
            AssertionError: one of them failed.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "SGLANG_", "FLAG"))}
        kept.pop("PYTHONPATH", None)
        path = os.pathsep.join((str(self.folder / "bin"), kept["PATH"]))
        state = {"HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder)}
        here = self.folder / "directory"
        done = subprocess.run(
            ["bash", "-euc", f"{commands}\npwd > {here}"],
            cwd=self.directory,
            env={**kept, **state, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "130"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout[-8000:]}"
        self.directory = Path(here.read_text().strip())
        return done.stdout


def make_machine(folder: Path) -> Machine:
    """Make the environments, and the commands ``pip``, ``fl`` and ``pytest``."""
    pythons = {host: _environment(folder / host, ROOT / base) for host, base in HOSTS.items()}
    words = {**pythons, "pythons": " ".join(map(str, pythons.values())), "uv": ROOT / ".venv-uv/bin/uv"}
    (folder / "bin").mkdir()
    for name, text in {"pip": PIP, "fl": FL.replace("/bin/sh", "/bin/bash"), "pytest": PYTEST}.items():
        command = folder / "bin" / name
        command.write_text(text.format(**words))
        command.chmod(0o755)
    (folder / "work").mkdir()
    return Machine(folder, folder / "work")


def _environment(folder: Path, base: Path) -> Path:
    """A virtual environment that has what another one has, and its interpreter."""
    python = base / "bin/python"
    assert python.exists(), f"'make {base.name}/.ready' sets up what is missing"
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (packages,) = (base / "lib").glob("python*/site-packages")
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "base.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return folder / "bin/python"


def normal(text: str) -> str:
    """Printed text without what differs from run to run: numbers, the frames of tables, white space."""
    return re.sub(r"[\s│┃]+", " ", re.sub(r"\d+(\.\d+)?", "0", text)).strip()
