"""vLLM as scenarios ask it: engines start one after the other in one process, by ``run_features``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import engines
from engines import start_features
from transformers import AutoTokenizer

from host_engines import Answer, Call, Encode, Engine, NamesOfVLLM, Pass, Served, rows_of_vllm
from processes import then

SEED = 3
"""Of drawn tokens."""


class VLLM(NamesOfVLLM):
    """A :class:`Host` with :class:`Programs`."""

    folder = engines.HERE
    environment = staticmethod(engines.environment)

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        given = {"VLLM_FL_PLUGIN_MODULES": ",".join(plugins), "VLLM_FL_DENY_VENDORS": deny, **variables}
        asked = [[step for one in engine.asked for step in _steps(one, engine)] for engine in engines]
        runs = ((engine.model, steps, engine.options) for engine, steps in zip(engines, asked, strict=True))
        process = start_features(*runs, **{name: value for name, value in given.items() if value})
        return [then(process, partial(_served, number, engine)) for number, engine in enumerate(engines)]


HOST = VLLM()


def _steps(asked: Pass | Call | Encode, engine: Engine) -> list[dict[str, Any]]:
    if isinstance(asked, Call):
        return [{"do": asked.name, **asked.arguments}]
    prefer = "reference" if isinstance(asked, Encode) else asked.prefer
    orders = {operator: [f"impl:{impl_id}"] for operator, impl_id in asked.orders.items()}
    preferred = {"prefer": prefer} if prefer else {}
    policy = [{"do": "reset_prefix_cache"}, {"do": "policy", **preferred, "per_op_order": orders}]
    if isinstance(asked, Encode):
        prompts = AutoTokenizer.from_pretrained(engine.model)(asked.texts).input_ids
        return [*(policy if orders else ()), {"do": "classify" if asked.classes else "embed", "prompts": prompts}]
    sampling = {"max_tokens": asked.max_tokens, "logprobs": 0, **({"prompt_logprobs": 0} if asked.scores else {})}
    if asked.samples:
        sampling = {"max_tokens": asked.max_tokens, "n": asked.samples, "seed": SEED, **asked.sampling}
    adapters = [name and str(engine.adapters[name]) for name in asked.adapters]
    return [
        *(policy if orders else ()),
        {"do": "generate", "prompts": asked.prompts, "sampling": sampling, **({"lora": adapters} if adapters else {})},
        *([{"do": "metrics", "contains": "spec_decode"}] if asked.drafts else ()),
    ]


def _answers(engine: Engine, results: Sequence[Any]) -> list[Answer]:
    found, behind = [], 0
    for asked in engine.asked:
        behind += len(_steps(asked, engine))
        if isinstance(asked, Call | Encode):
            found.append(Answer(returned=results[behind - 1]))
        elif asked.drafts:
            counted = results[behind - 1]
            accepted, made = (int(counted[f"vllm:spec_decode_num_{kind}_tokens"]) for kind in ("accepted", "draft"))
            found.append(replace(_answer(asked, results[behind - 2]), drafts=(accepted, made)))
        else:
            found.append(_answer(asked, results[behind - 1]))
    return found


def _answer(asked: Pass, outputs: Sequence[Mapping[str, Any]]) -> Answer:
    tokens, cached = [sample for one in outputs for sample in one["tokens"]], [one["cached"] for one in outputs]
    return Answer(asked.prompts, tokens, cached, () if asked.samples else rows_of_vllm(asked.prompts, outputs))


def _served(number: int, engine: Engine, result: Mapping[str, Any]) -> Served:
    run = result["runs"][number]
    return Served(_answers(engine, run["steps"]), run["reports"], result["log"])
