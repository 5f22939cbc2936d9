"""SGLang as scenarios ask it: a process for each engine, by ``run_sglang``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import serving
from serving import STEP, start

from host_engines import Answer, Call, Encode, Engine, NamesOfSGLang, Pass, Served
from processes import then

DRAFTED = 3
"""Tokens of a draft that our defaults ask for."""


class SGLang(NamesOfSGLang):
    """A :class:`Host` with :class:`Programs`."""

    folder = serving.HERE
    environment = staticmethod(serving.environment)

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        modules = ",".join((*plugins, "policy_method", "unwritten_memory"))
        given = {"SGLANG_FL_PLUGIN_MODULES": modules, **({"SGLANG_FL_DENY_VENDORS": deny} if deny else {}), **variables}
        return [_start(engine, {name: value for name, value in given.items() if value}) for engine in engines]


HOST = SGLang()


def _start(engine: Engine, variables: Mapping[str, str]) -> Future[Served]:
    served = {"lora_paths": {name: str(path) for name, path in engine.adapters.items()}} if engine.adapters else {}
    steps = [_step(one) for one in engine.asked]
    options = {**engine.options, **served}
    return then(start(engine.model, *steps, variables=variables, engine=options), partial(_served, engine))


def _served(engine: Engine, result: Mapping[str, Any]) -> Served:
    pairs = zip(engine.asked, result["steps"], strict=True)
    return Served([_answer(engine, one, step) for one, step in pairs], result["reports"], result["log"])


def _answer(engine: Engine, asked: Pass | Call | Encode, step: Mapping[str, Any]) -> Answer:
    if isinstance(asked, Encode):
        return Answer(returned=step["vectors"])
    if isinstance(asked, Call):
        return Answer(STEP["prompts"], step["tokens"], step["cached"], step["scores"], step["answer"])
    checks, accepted = (sum(pair[part] for pair in step["drafts"]) for part in (0, 1))
    of_a_check = engine.options.get("speculative_num_draft_tokens", 1) - 1
    made = checks * (of_a_check or engine.options.get("speculative_num_steps", DRAFTED))
    drafts = (accepted, made) if asked.drafts else None
    return Answer(asked.prompts, step["tokens"], step["cached"], step["scores"], step["answer"], drafts=drafts)


def _step(asked: Pass | Call | Encode) -> dict[str, Any]:
    if isinstance(asked, Call):
        return {**STEP, "call": (asked.name, asked.arguments)}
    orders = {operator: [f"impl:{impl_id}"] for operator, impl_id in asked.orders.items()}
    if isinstance(asked, Encode):
        policy = {"prefer": "reference", "per_op_order": orders}
        return {"encode": asked.texts, **({"policy": policy} if orders else {})}
    preferred = {"prefer": asked.prefer} if asked.prefer else {}
    return {
        "prompts": [prompt for prompt in asked.prompts for _ in range(asked.samples or 1)],
        "sampling": asked.sampling,
        "max_tokens": asked.max_tokens,
        "scores": asked.scores,
        **({"policy": {**preferred, "per_op_order": orders}} if orders else {}),
        **({"lora": asked.adapters} if asked.adapters else {}),
    }
