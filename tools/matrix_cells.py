"""Runs cells of the matrix in one environment: ``python matrix_cells.py CELLS.json FOLDER UNTIL``.

Each cell is an engine in a fork of this process, which has imported the host once. Its result, or the error that it
ended with, is written to ``FOLDER/NAME.json``, and what it printed to ``FOLDER/NAME.log``. None is started after UNTIL,
in seconds since the epoch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import run_data_parallel
import run_engine
import vllm.entrypoints.llm  # noqa: F401 - here, so that the forks need not
from engines import MAX_TOKENS, PROMPTS, STEP


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """The tokens and the reports of every rank."""
    if "data_parallel_size" in cell["engine"]:
        found = asyncio.run(run_data_parallel.main({"engine": cell["engine"], **STEP}))
        return {"tokens": found["tokens"], "reports": found["reports"]}
    found = run_engine.main({"engine": cell["engine"], "steps": [{"prompts": PROMPTS, "max_tokens": MAX_TOKENS}]})
    return {"tokens": [found["steps"][0]["tokens"]], "reports": found["reports"]}


def child(cell: dict[str, Any], folder: Path) -> None:
    """One cell, in a process group of its own, so that nothing of it can outlive its time limit."""
    os.setsid()
    log = os.open(folder / f"{cell['name']}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(cell["variables"])
    started = time.monotonic()
    try:
        result = run(cell)
    except BaseException as error:  # whatever ends an engine is this cell's state
        result = {"error": type(error).__name__, "message": str(error)}
    result["seconds"] = round(time.monotonic() - started, 1)
    (folder / f"{cell['name']}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def main(cells: list[dict[str, Any]], folder: Path, until: float) -> None:
    for cell in cells:
        if time.time() > until:
            return
        if (pid := os.fork()) == 0:
            child(cell, folder)
        deadline = time.monotonic() + cell["limit"]
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                (folder / f"{cell['name']}.json").write_text(
                    json.dumps({"error": "TimeoutError", "message": f"no result in {cell['limit']} s"})
                )
                os.killpg(pid, 9)
                os.waitpid(pid, 0)
                break
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(pid, 9)  # what the engine left behind
        print(json.dumps({"done": cell["name"]}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), float(sys.argv[3]))
