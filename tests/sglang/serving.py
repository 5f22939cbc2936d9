"""SGLang's engines in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import distributions
import processes
from fl_dispatch.cli.half_precision import table
from processes import Finished, free_port, pool
from running import MAX_TOKENS, PROMPTS

HERE = Path(__file__).parent
PLUGINS = (HERE / "plugins", HERE.parent / "plugins")  # the latter know no host
STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


def environment(**variables: str) -> dict[str, str]:
    """The environment of an engine: nothing of ours is set but these."""
    prefixes = ("VLLM_", "SGLANG_", "FLAG", "USE_FLAG", "FL_DISPATCH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    path = os.pathsep.join(filter(None, (*map(str, PLUGINS), os.environ.get("PYTHONPATH", ""))))
    fixed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **fixed, **variables}


def python(*arguments: str, timeout: float = 300, cold: bool = False, **variables: str) -> Finished:
    """Run Python in an engine's environment; ``cold``: see ``processes``."""
    return processes.python(*arguments, environment=environment(**variables), timeout=timeout, cold=cold)


def engine_arguments(model: Path, engine: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` for a small checkpoint, with those in ``engine`` instead or in addition."""
    return {
        "model_path": str(model),
        "dtype": "float32",
        "context_length": 512,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "chunked_prefill_size": 64,
        "grammar_backend": "none",
        "log_level": "info",
        "nccl_port": free_port(),
        **(engine or {}),
    }


def start(model: Path, *steps: Mapping[str, Any], **options: Any) -> Future[dict[str, Any]]:
    """Start an engine; the result has the tokens of each step, the report of every rank, and the log.

    Args:
        model: the checkpoint.
        steps: see ``run_sglang``; one with the standard prompts by default.
        options: ``variables``, ``policy_before``, ``engine``: further arguments of ``sglang.Engine``, ``doctor``:
            whether ``fl doctor`` is asked while the engine serves, ``linger``: seconds that it lives on after the
            steps, and ``cold``: whether its processes are really started (see ``processes``).
    """
    return pool.submit(_run, model, steps or (STEP,), **options)


def _run(
    model: Path,
    steps: tuple[Mapping[str, Any], ...],
    variables: Mapping[str, str] | None = None,
    policy_before: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    doctor: bool = False,
    linger: float = 0,
    cold: bool = False,
) -> dict[str, Any]:
    arguments = engine_arguments(model, engine)
    job = {"engine": arguments, "policy_before": policy_before, "steps": steps, "doctor": doctor, "linger": linger}
    return processes.finish(HERE / "run_sglang.py", job, environment(**(variables or {})), cold)


def answered(prompts: Sequence[Sequence[int]], step: Mapping[str, Any]) -> tuple[list[list[int]], Tensor]:
    """A step's texts, prompt and choices, and its log-probabilities of every token after the first of each."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, step["tokens"], strict=True)]
    return texts, torch.tensor([score for scores in step["scores"] for score in scores])


def every_score(step: Mapping[str, Any]) -> Tensor:
    """A step's log-probabilities of all tokens, ``[tokens, vocabulary]``, if it asked for as many of the best ones.

    They are those after every token of a text but its last, and after the tokens of answers alone where no ``scores``
    were asked for.
    """
    read = ((*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]) for meta in step["metas"])
    return table({str(token): score for score, token, _ in row} for rows in read for row in rows)


def background(*arguments: str, cold: bool = False, **variables: str) -> Future[Finished]:
    """Run Python beside other engines."""
    return pool.submit(lambda: python(*arguments, cold=cold, **variables))


def server_arguments(model: Path) -> tuple[str, ...]:
    """The command line of ``sglang.launch_server`` for a small checkpoint."""
    options = {"dtype": "float32", "context-length": 512, "max-total-tokens": 4096, "max-running-requests": 4}
    options["nccl-port"] = free_port()
    named = (part for name, value in options.items() for part in (f"--{name}", str(value)))
    return ("--model-path", str(model), "--host", "127.0.0.1", "--skip-server-warmup", *named)


def distribution(folder: Path, entry: str) -> str:
    """Install a plugin into a folder, beside the tests' own; ``PYTHONPATH`` with them.

    Args:
        folder: an empty one.
        entry: ``module:function``, which SGLang calls in each of its processes.
    """
    distributions.install(folder, "fl-test-plugin", f"[sglang.srt.plugins]\nfl_test_plugin = {entry}\n")
    return os.pathsep.join((str(folder), environment()["PYTHONPATH"]))
