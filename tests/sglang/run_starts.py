"""Starts of SGLang in forks of this process: ``python run_starts.py job.json result.json``.

It is a fork of a warm one. SGLang itself, and all of ours, is imported in the fork. A job is
``{"server": command line, "engine": arguments of sglang.Engine, "starts": name → {"how": "server" or "engine",
"variables": of the environment}}``; the result is name → ``{"code": exit code, "log": output}``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def _fork(name: str, log: Path, job: dict[str, Any]) -> int:
    """Start in a fork whose output goes to a file; its process number."""
    start = job["starts"][name]
    if (pid := os.fork()) != 0:
        return pid
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(start["variables"])
    code = 1
    try:
        if start["how"] == "server":
            sys.argv = ["launch_server", *job["server"]]
            runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        else:
            import sglang

            sglang.Engine(**job["engine"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        logs = {name: Path(folder, name) for name in job["starts"]}

        def finish(name: str) -> int:
            _, status = os.waitpid(_fork(name, logs[name], job), 0)
            return os.waitstatus_to_exitcode(status)

        codes = dict(zip(logs, pool.map(finish, logs), strict=True))
        return {name: {"code": codes[name], "log": logs[name].read_text()} for name in logs}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
