"""Features that SGLang has for its users work over our operators: what a request may ask for, and new weights.

One engine answers all of it. Expected is what Hugging Face's network computes; where a rule of SGLang's changes logits,
it is a line here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import STEP, start

import variants
from processes import free_port
from running import MAX_TOKENS, PROMPTS, expected_tokens, reference_network

pytest.importorskip("sglang")

FORCED, BIASED = 9, 17
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
STRUCTURES = {
    "json_schema": (json.dumps(SCHEMA), r"\{\s*\"a\"\s*:\s*(true|false)\s*\}"),
    "regex": ("[ab]{3}c", "[ab]{3}c"),
    "ebnf": ('root ::= "yes" | "no"', "yes|no"),
}
PENALTIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "frequency_penalty": lambda logits, said: logits - 2 * said,
    "presence_penalty": lambda logits, said: logits - 2 * (said > 0),
    "repetition_penalty": lambda logits, said: torch.where(
        said > 0, torch.where(logits < 0, logits * 2, logits / 2), logits
    ),
}
"""By 2 each, of the tokens that were generated so far; ``said`` is how often each was."""
CUT = 10
"""The prompt of a session is divided here."""
SHARES = {"model.layers.0.self_attn.qkv_proj.weight": 3}


def steps(other: Path, own: Path, stop: int) -> dict[str, dict[str, Any]]:
    """Name → a step of the engine."""
    scored = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [[5, 6]] * len(PROMPTS)}
    ended = {"ignore_eos": False, "stop_token_ids": [stop]}
    first = {"session_params": {"id": "one"}, "rid": ["first"]}
    second = {"session_params": {"id": "one", "rid": "first", "offset": CUT}}
    return {
        "scores": {**STEP, "more": scored},
        **{name: {**STEP, "sampling": {name: 2.0}} for name in PENALTIES},
        "bias": {**STEP, "sampling": {"logit_bias": {str(BIASED): 1e4}}},
        "stop": {**STEP, "sampling": ended},
        "later": {**STEP, "sampling": {**ended, "min_new_tokens": 8}},
        "forced": {**STEP, "sampling": {"custom_params": {"token": FORCED}}, "forced": True},
        "states": {**STEP, "more": {"return_hidden_states": True}},
        "twice": {**STEP, "sampling": {"n": 2}},
        **{
            name: {"prompts": PROMPTS[:1], "max_tokens": 40, "sampling": {name: asked, "ignore_eos": False}}
            for name, (asked, _) in STRUCTURES.items()
        },
        "first": {
            "prompts": [PROMPTS[1][:CUT]],
            "max_tokens": 1,
            "call": ["open_session", {"capacity_of_str_len": 1000, "session_id": "one"}],
            "more": first,
        },
        "second": {"prompts": [PROMPTS[1][CUT:]], "max_tokens": MAX_TOKENS, "more": second},
        **new_weights(other, own),
    }


def new_weights(other: Path, own: Path) -> dict[str, dict[str, Any]]:
    """Ways to other weights and back, the last one to an engine that sleeps."""
    return {
        "disk": {**STEP, "call": ["update_weights_from_disk", {"model_path": str(other)}]},
        "tensors": {**STEP, "weights": str(own)},
        "group": {**STEP, "weights": str(other), "group": free_port()},
        "asleep": {**STEP, "weights": str(own), "call": ["release_memory_occupation", {}]},
    }


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint with a tokenizer that can spell, and one with other weights."""
    folder = tmp_path_factory.mktemp("features")
    own = variants.with_characters(checkpoint("qwen3"), folder / "own")
    return own, variants.other_weights(own, folder / "other")


@pytest.fixture(scope="module")
def result(models: tuple[Path, Path], expected: Callable[[str], list[list[int]]]) -> Callable[[str], dict[str, Any]]:
    """A step's name → what it gave; ``report``: the engine's."""
    named = steps(models[1], models[0], expected("qwen3")[0][3])
    engine = {
        "grammar_backend": "xgrammar",
        "enable_custom_logit_processor": True,
        "enable_return_hidden_states": True,
        "disable_overlap_schedule": True,  # with it SGLang's penalties come a step late
        "constrained_json_disable_any_whitespace": True,
    }
    run = start(models[0], *named.values(), engine=engine, variables={"SGLANG_FL_PREFER": "reference"})
    return lambda name: {**dict(zip(named, run.result()["steps"], strict=True)), "report": run.result()["report"]}[name]


@pytest.fixture(scope="module")
def network(models: tuple[Path, Path]) -> Callable[[bool], Any]:
    """Hugging Face's network, of the other weights or not."""
    return cache(lambda other: reference_network(models[other], torch.float32))


def _continued(network: Any, text: list[int], change: Callable[..., torch.Tensor] | None = None) -> list[int]:
    """The tokens after a text that have the best logits, which ``change`` sees with each token's number so far."""
    found, said = list(text), torch.zeros(network.config.vocab_size)
    with torch.no_grad():
        for _ in range(MAX_TOKENS):
            logits = network(torch.tensor([found])).logits[0, -1]
            found.append(int((logits if change is None else change(logits, said)).argmax()))
            said[found[-1]] += 1
    return found[len(text) :]


def test_log_probabilities_of_the_best_and_of_named_tokens_are_hugging_faces(
    result: Callable[[str], dict[str, Any]], network: Callable[[bool], Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result("scores")["tokens"] == expected("qwen3")
    for prompt, tokens, meta in zip(PROMPTS, expected("qwen3"), result("scores")["metas"], strict=True):
        with torch.no_grad():
            logits = network(False)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        right = logits.log_softmax(-1)
        for row, best, named in zip(right, meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True):
            assert [token for _, token, *_ in best] == row.topk(3).indices.tolist()
            for score, token, *_ in (*best, *named):
                assert abs(score - float(row[token])) < 1e-2
            assert [token for _, token, *_ in named] == [5, 6]


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_changes_the_tokens_as_it_should(
    name: str, result: Callable[[str], dict[str, Any]], network: Callable[[bool], Any]
) -> None:
    right = [_continued(network(False), prompt, PENALTIES[name]) for prompt in PROMPTS]
    assert result(name)["tokens"] == right


def test_a_bias_and_a_processor_of_logits_decide(result: Callable[[str], dict[str, Any]]) -> None:
    assert result("bias")["tokens"] == [[BIASED] * MAX_TOKENS] * len(PROMPTS)
    assert result("forced")["tokens"] == [[FORCED] * MAX_TOKENS] * len(PROMPTS)


def test_a_stop_token_ends_the_answer_where_it_may(
    result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    whole = expected("qwen3")[0]
    assert result("stop")["tokens"][0] == whole[:4]
    assert len(result("later")["tokens"][0]) >= 8
    assert whole[3] not in result("later")["tokens"][0][:8]


def test_hidden_states_are_hugging_faces(
    result: Callable[[str], dict[str, Any]], network: Callable[[bool], Any], expected: Callable[[str], list[list[int]]]
) -> None:
    for prompt, tokens, meta in zip(PROMPTS, expected("qwen3"), result("states")["metas"], strict=True):
        with torch.no_grad():
            states = network(False).model(torch.tensor([[*prompt, *tokens]])).last_hidden_state[0]
        first, *rest = meta["hidden_states"]
        got = torch.tensor([first[-1], *rest])
        assert torch.allclose(got, states[len(prompt) - 1 : -1], atol=1e-3, rtol=1e-3)


def test_one_prompt_is_answered_twice(
    result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result("twice")["tokens"] == [tokens for tokens in expected("qwen3") for _ in range(2)]


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_answer_has_the_structure_that_was_asked_for(name: str, result: Callable[[str], dict[str, Any]]) -> None:
    (text,) = result(name)["texts"]
    assert re.fullmatch(STRUCTURES[name][1], text)


def test_a_session_goes_on_where_it_was(
    result: Callable[[str], dict[str, Any]], network: Callable[[bool], Any]
) -> None:
    assert result("first")["answer"] == "one"
    text = [*PROMPTS[1][:CUT], *PROMPTS[1][CUT:]]
    assert result("second")["tokens"] == [_continued(network(False), text)]


@pytest.mark.parametrize("way", ["disk", "group"])
def test_new_weights_answer(way: str, result: Callable[[str], dict[str, Any]], network: Callable[[bool], Any]) -> None:
    assert result(way)["tokens"] == [_continued(network(True), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("way", ["tensors", "asleep"])
def test_the_first_weights_come_back(
    way: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result(way)["tokens"] == expected("qwen3")


def test_new_weights_reach_sparse_latent_attention(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    own = checkpoint("deepseek_v32")
    named = new_weights(other := variants.other_weights(own, tmp_path / "other"), own)
    engine, variables = {"disable_overlap_schedule": True}, {"SGLANG_FL_PREFER": "reference"}
    answers = start(own, *named.values(), engine=engine, variables=variables).result()["steps"]
    right = [expected_tokens(model) for model in (other, own)]
    assert right[0] != right[1]
    assert [answer["tokens"] for answer in answers] == right * 2


def test_every_layer_is_ours(result: Callable[[str], dict[str, Any]]) -> None:
    report = result("report")
    assert report["native_layers"] == report["undispatched"] == report["failed"] == report["fallen_through"] == {}
