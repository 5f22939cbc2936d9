"""vLLM engines on the emulated NPU, started for a test file, and what their reports say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from fl_dispatch.cli.checkpoints import VOCABULARY
from host_engines import Answer, Call, Engine, NamesOfVLLM, Pass, Served, rows_of_vllm
from processes import finish, pool, then
from running import MAX_TOKENS, PROMPTS

SCRIPT = Path(__file__).with_name("run_npu_vllm.py")
STEP: Mapping[str, Any] = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
"""The standard prompts, in chunks of 64 tokens, because no batch is larger."""
LLAMA = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention", "linear"}
"""The operators of Llama and Qwen3."""
SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "EMU_NPUS": "2"}
"""The environment of an engine that spawns its processes, for two devices."""


def start(
    model: Path, dtype: str, steps: list[Mapping[str, Any]], environment: Mapping[str, str], **engine: Any
) -> Future[Any]:
    """Run steps (see :mod:`run_npu_vllm`) on an engine in a process of its own; ``engine`` are arguments of ``LLM``."""
    arguments = {
        "model": str(model),
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "max_logprobs": VOCABULARY,
        **engine,
    }
    return pool.submit(finish, SCRIPT, {"engine": arguments, "steps": steps}, environment)


def counts(report: Mapping[str, Any]) -> dict[str, set[str]]:
    """Operator → the implementations that ran."""
    found: dict[str, set[str]] = {}
    for operator, impl_id in (key.split(" ") for key in report["counts"]):
        found.setdefault(operator, set()).add(impl_id)
    return found


class VLLMOnNPU(NamesOfVLLM):
    """vLLM on ``npu:0`` as scenarios ask it (a :class:`Host`); ``environment`` makes that of an engine."""

    def __init__(self, environment: Callable[..., dict[str, str]]) -> None:
        self._environment = environment

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        assert not plugins
        assert not deny
        return [self._start(engine, variables) for engine in engines]

    def _start(self, engine: Engine, variables: Mapping[str, str]) -> Future[Served]:
        options = dict(engine.options)
        steps = [_step(one) for one in engine.asked]
        environment = {name: value for name, value in self._environment(**variables).items() if value}
        started = start(engine.model, options.pop("dtype"), steps, environment, **options)
        return then(started, partial(_served, engine))


def _step(asked: Pass | Call) -> Mapping[str, Any]:
    assert isinstance(asked, Pass)
    wrong = {"wrong": asked.kernel, "reset": True} if asked.kernel else {}
    return {"prompts": asked.prompts, "max_tokens": asked.max_tokens, "scores": asked.scores, **wrong}


def _served(engine: Engine, result: Mapping[str, Any]) -> Served:
    answers = []
    for asked, step in zip(engine.asked, result["steps"], strict=True):
        assert isinstance(asked, Pass)
        rows = rows_of_vllm(asked.prompts, step["answers"]) if asked.scores else ()
        numbers = {"kernels": step["kernels"], "waits": step["waits"]}
        answers.append(Answer(asked.prompts, step["tokens"], step["cached"], rows, **numbers))
    return Served(answers, result["reports"], result["log"])
