"""Requests whose tokens must not depend on how many steps a scheduler call makes, and the engines that get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Runs

from vllm_fl.compat.arrivals import TOOLS

MOST = 8
"""Steps that a scheduler call may make."""
VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_FL_STEPS_MS": "10000"}
"""Of all engines: the time of a step on a busy machine shall not bound the number of steps."""
NEW = 40
ENDS = list(range(3, 260, 9))
"""Tokens that end a request: so many that some request meets one."""
BLOCKS = 50
CROWD = [PROMPTS[2][7 * place :][:185] for place in range(4)]
"""Prompts of 12 blocks each: there is room for all of them, but not for their completions."""
NAMED: Sequence[Mapping[str, Any]] = ({"logprob_token_ids": [5, 50]}, {"logprobs": 2}, {}, {"logprob_token_ids": [7]})
"""What requests of one batch ask of their scores."""


def _ask(**sampling: Any) -> dict[str, Any]:
    return {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": NEW, **sampling}}


ASKED: Mapping[str, Mapping[str, Any]] = {
    "greedy": _ask(logprobs=3),
    "seeds": _ask(temperature=1.0, seed=7, logprobs=1),
    "top-k, top-p and min-p": _ask(temperature=1.0, seed=1, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": _ask(temperature=0.7, seed=2, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "bad words and allowed tokens": _ask(bad_words=["a", "e"], allowed_token_ids=list(range(10, 200))),
    "end tokens": _ask(temperature=1.0, seed=3, stop_token_ids=ENDS, logprobs=1),
    "a least length": _ask(temperature=1.0, seed=3, stop_token_ids=ENDS, min_tokens=17),
    "lengths": _ask() | {"sampling": [{"max_tokens": 1 + 12 * place} for place in range(len(PROMPTS))]},
    "scores of tokens that requests name": _ask()
    | {"sampling": [{"max_tokens": NEW, **NAMED[place % len(NAMED)]} for place in range(len(PROMPTS))]},
    "stop strings": _ask(temperature=1.0, seed=4, stop=list("abcdefghijklmnopqrstuvwxyz")),
    "a grammar": _ask(structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}, ignore_eos=False),
    "samples": _ask(temperature=1.0, seed=5, n=2),
    "a cached prefix": _ask(),
}
"""Subject → a step of ``run_features``."""


def engines(
    model: Path, adapter: Path | None, **engine: Any
) -> list[tuple[Path, Sequence[Mapping[str, Any]], Mapping[str, Any]]]:
    """Runs of ``start_features``: all requests with an adapter, and requests that take each other's blocks."""
    count = len(PROMPTS)
    asked = list(ASKED.values())
    leave = {"do": "join_and_leave", "prompts": PROMPTS, "max_tokens": NEW, "leave": {"1": 6}}
    asked.append({**leave, "arrive": [0, 1, 12, 12][:count] + [12] * (count - 4)})
    asked.append({"do": "streamed", "prompts": PROMPTS, "sampling": {"max_tokens": NEW}})
    asked += [{"do": "metrics", "contains": part} for part in ("generation_tokens", "spec_decode")]
    lora: dict[str, Any] = {}
    if adapter is not None:
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
        asked.append(
            _ask(temperature=1.0, seed=6) | {"lora": [str(adapter), None] * (count // 2) + [None] * (count % 2)}
        )
    tools = {"max_tokens": NEW, "extra_args": {TOOLS: True}}
    asked.append({"do": "streamed", "prompts": PROMPTS, "sampling": tools})
    crowd = {"do": "generate", "prompts": CROWD, "sampling": {"max_tokens": NEW}}
    crowded = [crowd, {"do": "metrics", "contains": "num_preemptions"}]
    return [
        (model, asked, {**engine, **lora}),
        (model, crowded, {**engine, "num_gpu_blocks_override": BLOCKS}),
    ]


def alike(one: Any, several: Any) -> bool:
    """Whether answers are the same: tokens and texts exactly, scores to a rounding, which depends on a batch's rows.

    Scores reach -80 here, where products of one row and of several differ by up to 1.2e-4.
    """
    if isinstance(one, float):
        return one == pytest.approx(several, abs=4e-4)
    if isinstance(one, dict):
        return one.keys() == several.keys() and all(alike(value, several[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(several) and all(map(alike, one, several))
    return bool(one == several)


def whole(answers: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The tokens of streamed answers."""
    return [[token for piece in pieces for token in piece] for pieces in answers]


class Compared:
    """What engines answered with one step per scheduler call and with several.

    Args:
        runs: ``one`` and ``several`` → the result of ``start_features``.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def steps(self, run: int, place: int) -> tuple[Any, Any]:
        """What a step gave in both."""
        one, several = (self.runs[name]["runs"][run]["steps"][place] for name in ("one", "several"))
        return one, several

    def named(self, subject: str) -> tuple[Any, Any]:
        """What requests gave in both, by subject."""
        return self.steps(0, list(ASKED).index(subject))

    def made(self, run: int) -> list[dict[str, int]]:
        """Steps of a scheduler call → scheduler calls, of each rank of the engine with several."""
        return [report["steps"] for report in self.runs["several"]["runs"][run]["reports"]]
