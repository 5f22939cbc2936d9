"""A request may ask for other grammars, embeddings as a prompt, a priority, and a processor of logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, start_features

import variants

GRAMMAR = 'root ::= "yes" | "no" "!"'
CONSTRAINTS = {
    "guidance": {
        "schema": {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        "regex": {"regex": "[a-c]{3}"},
        "choice": {"choice": ["alpha", "beta"]},
    },
    "outlines": {"regex": {"regex": "[a-c]{3}"}, "choice": {"choice": ["alpha", "beta"]}},
    "xgrammar": {"grammar": {"grammar": GRAMMAR}, "choice": {"choice": ["alpha", "beta"]}},
}
MATCHES = {
    "schema": lambda text: isinstance(json.loads(text)["a"], bool),
    "regex": lambda text: re.fullmatch("[a-c]{3}", text) is not None,
    "choice": lambda text: text in ("alpha", "beta"),
    "grammar": lambda text: text in ("yes", "no!"),
}
FORCED = 17
ARRIVED = [PROMPTS[0], PROMPTS[1], PROMPTS[0][::-1], PROMPTS[1][::-1], PROMPTS[3]]
PRIORITIES = [3, 2, 4, 5, 1]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    return variants.with_characters(checkpoint("qwen3"), folder / "qwen3", unnamed=1)  # guidance adds a token


@pytest.fixture(scope="module")
def runs(model: Path) -> dict[str, Any]:
    """An engine for each backend of structured output; the first one answers the rest too."""

    def constrained(backend: str) -> dict[str, Any]:
        asked = [
            {"max_tokens": 40, "ignore_eos": False, "structured_outputs": how} for how in CONSTRAINTS[backend].values()
        ]
        return {"do": "generate", "prompts": PROMPTS[: len(asked)], "sampling": asked}

    def options(backend: str) -> dict[str, Any]:
        return {"structured_outputs_config": {"backend": backend, "disable_any_whitespace": backend != "outlines"}}

    forced = [{"max_tokens": 4}, {"max_tokens": 4, "extra_args": {"only": FORCED}}]
    rest = [
        {"do": "generate", "prompts": PROMPTS[:2], "sampling": forced},
        {"do": "embedded", "folder": str(model), "prompts": PROMPTS, "max_tokens": MAX_TOKENS},
        {"do": "prioritized", "prompts": ARRIVED, "priorities": PRIORITIES, "max_tokens": 3},
    ]
    more = {
        "enable_prompt_embeds": True,
        "logits_processors": ["forced_token:ForcedToken"],
        "scheduling_policy": "priority",
        "max_num_seqs": 2,
    }
    names = list(CONSTRAINTS)
    jobs = [(model, [constrained(name), *(rest if not i else ())], {**options(name), **(more if not i else {})})
            for i, name in enumerate(names)]  # fmt: skip
    return dict(zip(names, start_features(*jobs).result()["runs"], strict=True))


@pytest.mark.parametrize(("backend", "kind"), [(name, kind) for name, how in CONSTRAINTS.items() for kind in how])
def test_output_has_the_structure_that_was_asked_for(backend: str, kind: str, runs: dict[str, Any]) -> None:
    place = list(CONSTRAINTS[backend]).index(kind)
    assert MATCHES[kind](runs[backend]["steps"][0][place]["texts"][0])


def test_a_users_processor_of_logits_reaches_the_request_that_asks_for_it(
    runs: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    plain, forced = (output["tokens"][0] for output in runs["guidance"]["steps"][1])
    assert plain == expected("qwen3")[0][:4]
    assert forced == [FORCED] * 4


def test_embeddings_as_a_prompt_give_the_tokens_of_their_words(
    runs: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert runs["guidance"]["steps"][2] == expected("qwen3")


def test_requests_of_priority_are_served_first(runs: dict[str, Any]) -> None:
    finished = runs["guidance"]["steps"][3]
    assert finished == sorted(range(len(PRIORITIES)), key=PRIORITIES.__getitem__)
    assert runs["guidance"]["report"]["native_layers"] == {}
