"""SGLang's engines on the emulated NPU, in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from host_engines import Answer, Call, Engine, NamesOfSGLang, Pass, Served
from processes import finish, pool, then

HERE = Path(__file__).parent
MEMORY = 16 << 30
"""Bytes of an emulated device: SGLang leaves some gigabytes free."""


def run(
    model: Path,
    steps: Sequence[Mapping[str, Any]],
    engine: Mapping[str, Any] | None = None,
    path: Sequence[Path] = (),
    cold: bool = False,
    **variables: str,
) -> dict[str, Any]:
    """The result of ``run_npu_sglang``. No argument of the engine is about graphs: none is needed.

    Args:
        model: the checkpoint.
        steps: see ``run_npu_sglang``.
        engine: further arguments of ``sglang.Engine``.
        path: of modules beside this folder's plugins.
        cold: see ``processes``; more than one device needs it, because a warm process has counted one already.
        variables: of the environment; nothing else of ours is set.
    """
    prefixes = ("VLLM_", "SGLANG_", "FLAG", "USE_FLAG", "EMU_")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(prefixes)},
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(HERE / "plugins"), *map(str, path), os.environ.get("PYTHONPATH")))
        ),
        "EMU_NPU_BYTES": str(MEMORY),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    arguments = {
        "model_path": str(model),
        "context_length": 512,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "chunked_prefill_size": 128,
        "mem_fraction_static": 0.8,
        "grammar_backend": "none",
        "log_level": "info",
        **(engine or {}),
    }
    return finish(HERE / "run_npu_sglang.py", {"engine": arguments, "steps": list(steps)}, environment, cold)


class SGLangOnNPU(NamesOfSGLang):
    """SGLang on ``npu:0`` as scenarios ask it (a :class:`Host`)."""

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        assert not plugins
        assert not deny
        given = {"SGLANG_FL_PLUGIN_MODULES": "wrong_kernels", "SGLANG_FL_PREFER": "vendor", **variables}
        return [_start(engine, {name: value for name, value in given.items() if value}) for engine in engines]


def _start(engine: Engine, variables: Mapping[str, str]) -> Future[Served]:
    steps = [_step(one) for one in engine.asked]
    return then(pool.submit(run, engine.model, steps, engine.options, **variables), partial(_served, engine))


def _step(asked: Pass | Call) -> Mapping[str, Any]:
    assert isinstance(asked, Pass)
    wrong = {"wrong": asked.kernel} if asked.kernel else {}
    return {"prompts": asked.prompts, "max_tokens": asked.max_tokens, "scores": asked.scores, **wrong}


def _served(engine: Engine, result: Mapping[str, Any]) -> Served:
    answers = []
    for asked, step in zip(engine.asked, result["steps"], strict=True):
        assert isinstance(asked, Pass)
        answers.append(Answer(asked.prompts, step["tokens"], step["cached"], step["scores"]))
    return Served(answers, result["reports"], result["log"])
