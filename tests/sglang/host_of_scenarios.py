"""SGLang as scenarios ask it: a process for each engine, by ``run_sglang``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from serving import STEP, start

from host_engines import Answer, Call, Engine, NamesOfSGLang, Pass, Served
from processes import then


class SGLang(NamesOfSGLang):
    """A :class:`Host`."""

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        modules = ",".join((*plugins, "policy_method", "unwritten_memory"))
        given = {"SGLANG_FL_PLUGIN_MODULES": modules, **({"SGLANG_FL_DENY_VENDORS": deny} if deny else {}), **variables}
        return [_start(engine, given) for engine in engines]


def _start(engine: Engine, variables: Mapping[str, str]) -> Future[Served]:
    served = {"lora_paths": {name: str(path) for name, path in engine.adapters.items()}} if engine.adapters else {}
    steps = [_step(one) for one in engine.asked]
    options = {**engine.options, **served}
    return then(start(engine.model, *steps, variables=variables, engine=options), partial(_served, engine))


def _served(engine: Engine, result: Mapping[str, Any]) -> Served:
    pairs = zip(engine.asked, result["steps"], strict=True)
    return Served([_answer(one, step) for one, step in pairs], result["reports"], result["log"])


def _answer(asked: Pass | Call, step: Mapping[str, Any]) -> Answer:
    prompts = STEP["prompts"] if isinstance(asked, Call) else asked.prompts
    return Answer(prompts, step["tokens"], step["cached"], step["scores"], step["answer"])


def _step(asked: Pass | Call) -> dict[str, Any]:
    if isinstance(asked, Call):
        return {**STEP, "call": (asked.name, asked.arguments)}
    orders = {operator: [f"impl:{impl_id}"] for operator, impl_id in asked.orders.items()}
    preferred = {"prefer": asked.prefer} if asked.prefer else {}
    return {
        "prompts": asked.prompts,
        "max_tokens": asked.max_tokens,
        "scores": asked.scores,
        **({"policy": {**preferred, "per_op_order": orders}} if orders else {}),
        **({"lora": asked.adapters} if asked.adapters else {}),
    }
