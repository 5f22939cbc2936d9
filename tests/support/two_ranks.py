"""Two ranks in separate processes that exchange tensors, once for each library.

A script calls :func:`main` with the work of one rank; a test starts the script with :func:`run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RANKS = 2
HOST_PREFIXES = ("VLLM_", "SGLANG_", "FLAG", "USE_FLAG")


def run(script: Path, folder: Path, libraries: Mapping[str, Path | str]) -> dict[str, list[Any]]:
    """Run a script; return library → the result of its work on each rank, with tensors as lists.

    Args:
        script: calls :func:`main`.
        folder: an empty one.
        libraries: name → value of ``FLAGCX_PATH``; empty for ``torch.distributed``.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(HOST_PREFIXES)}
    arguments = [f"{name}={path}" for name, path in libraries.items()]
    ended = subprocess.run(
        [sys.executable, script, folder, *arguments],
        env={**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)] for name in libraries
    }


def main(work: Callable[[str, int, str], Mapping[str, Any]]) -> None:
    """``python SCRIPT FOLDER NAME=FLAGCX_PATH …``: call ``work`` with the name, the rank and where the ranks meet."""
    folder = Path(sys.argv[1])
    for name, path in (argument.split("=", 1) for argument in sys.argv[2:]):
        os.environ["FLAGCX_PATH"] = path
        children = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                got = work(name, rank, f"file://{folder}/{name}")
                (folder / f"{name}-{rank}.json").write_text(json.dumps(_plain(got)))
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"the ranks over {name} ended with {codes}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
