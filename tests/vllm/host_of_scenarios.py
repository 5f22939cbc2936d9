"""vLLM as scenarios ask it: engines start one after the other in one process, by ``run_features``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from engines import start_features

from host_engines import Answer, Call, Engine, NamesOfVLLM, Pass, Served, rows_of_vllm
from processes import then


class VLLM(NamesOfVLLM):
    """A :class:`Host`."""

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        given = {"VLLM_FL_PLUGIN_MODULES": ",".join(plugins), "VLLM_FL_DENY_VENDORS": deny}
        asked = [[step for one in engine.asked for step in _steps(one, engine)] for engine in engines]
        runs = ((engine.model, steps, engine.options) for engine, steps in zip(engines, asked, strict=True))
        process = start_features(*runs, **{name: value for name, value in given.items() if value}, **variables)
        return [then(process, partial(_served, number, engine)) for number, engine in enumerate(engines)]


def _steps(asked: Pass | Call, engine: Engine) -> list[dict[str, Any]]:
    if isinstance(asked, Call):
        return [{"do": asked.name, **asked.arguments}]
    orders = {operator: [f"impl:{impl_id}"] for operator, impl_id in asked.orders.items()}
    preferred = {"prefer": asked.prefer} if asked.prefer else {}
    policy = [{"do": "reset_prefix_cache"}, {"do": "policy", **preferred, "per_op_order": orders}]
    sampling = {"max_tokens": asked.max_tokens, "logprobs": 0, **({"prompt_logprobs": 0} if asked.scores else {})}
    adapters = [name and str(engine.adapters[name]) for name in asked.adapters]
    return [
        *(policy if orders else ()),
        {"do": "generate", "prompts": asked.prompts, "sampling": sampling, **({"lora": adapters} if adapters else {})},
    ]


def _answers(engine: Engine, results: Sequence[Any]) -> list[Answer]:
    """Of each pass or call the result of its last step."""
    found, behind = [], 0
    for asked in engine.asked:
        behind += len(_steps(asked, engine))
        result = results[behind - 1]
        found.append(Answer(returned=result) if isinstance(asked, Call) else _answer(asked, result))
    return found


def _answer(asked: Pass, outputs: Sequence[Mapping[str, Any]]) -> Answer:
    tokens, cached = [one["tokens"][0] for one in outputs], [one["cached"] for one in outputs]
    return Answer(asked.prompts, tokens, cached, rows_of_vllm(asked.prompts, outputs) if asked.scores else ())


def _served(number: int, engine: Engine, result: Mapping[str, Any]) -> Served:
    run = result["runs"][number]
    return Served(_answers(engine, run["steps"]), run["reports"], result["log"])
