"""Features of vLLM that need nothing of ours but right operators, in one engine."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, RUNNERS, expected_tokens, start_features

import variants
from sampling import drawn

BLOCKS = 50
"""KV blocks of 16 tokens: the long prompt takes 22, so a third one evicts the first."""
GREEDY = {"max_tokens": MAX_TOKENS}
SEEDED = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 7}
SAMPLES, TOP = 1500, 4
SPREAD = {"n": SAMPLES, "temperature": 2.0, "top_k": TOP, "seed": 3, "max_tokens": 1}
WIDTH, DEPTH = 3, 6
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "ready": {"type": "boolean"}},
    "required": ["color", "ready"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["alpha", "beta"]},
    "regex": {"regex": "[a-c]{3}-[0-9]{2}"},
    "schema": {"json": SCHEMA},
}
STOPS = {"PYTHONBREAKPOINT": "worker_extension.note_stop"}
NO_SPACES = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Allowed white space, a random model writes nothing else."""
LONG = PROMPTS[2]
CROWD = [LONG[7 * place :][:185] for place in range(4)]
"""Prompts of 12 blocks each, no two blocks alike: there is room for all of them, but not for their completions."""
CROWDED = {"max_tokens": 40}


def _generate(prompts: list[list[int]], sampling: Any = GREEDY, **options: Any) -> dict[str, Any]:
    return {"do": "generate", "prompts": prompts, "sampling": sampling, **options}


def _flatten(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Logits a fiftieth as far apart: the same order, and something to draw from."""
    return tensor * 0.02 if name == "model.norm.weight" else tensor


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Qwen3, less sure of its tokens, with a tokenizer that can spell and advice on how to sample."""
    folder = tmp_path_factory.mktemp("features")
    unsure = variants.changed(checkpoint("qwen3"), folder / "unsure", _flatten)
    path = variants.with_characters(unsure, folder / "qwen3")
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.3, "top_k": 5}))
    return path


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    return variants.other_weights(model, model.parent / "other")


@pytest.fixture(scope="module", params=drawn(tuple(RUNNERS), 1, "model runner"))
def results(request: pytest.FixtureRequest, model: Path, other: Path) -> dict[str, Any]:
    """The result of each named step, on one of vLLM's model runners."""
    constrained = [{"max_tokens": 60, "ignore_eos": False, "structured_outputs": how} for how in CONSTRAINTS.values()]
    load = [{"do": "rpc", "method": "trainer_load", "args": [str(path)]} for path in (other, model)]
    reset = {"do": "reset_prefix_cache"}
    named: dict[str, dict[str, Any]] = {
        "defaults": {"do": "default_sampling"},
        "greedy": _generate(PROMPTS, {**GREEDY, "logprobs": 5}),
        "seeded": _generate(PROMPTS, SEEDED),
        "seeded alone": _generate([PROMPTS[1]], SEEDED),
        "another seed": _generate(PROMPTS, {**SEEDED, "seed": 8}),
        "parallel": _generate(PROMPTS[:2], {**SEEDED, "n": 2}),
        "spread": _generate(PROMPTS[:1], SPREAD),
        "beams": {"do": "beam_search", "prompts": PROMPTS[:2], "width": WIDTH, "max_tokens": DEPTH},
        "constrained": _generate(PROMPTS[:3], constrained),
        "unconstrained": _generate(PROMPTS[:1], {"max_tokens": 8}),
        "joined": {
            "do": "join_and_leave",
            "prompts": PROMPTS,
            "arrive": [0, 3, 5, 12],
            "leave": {"1": 6},
            "max_tokens": MAX_TOKENS,
        },
        "reset": reset,
        "salt a": _generate([LONG], salt="a"),
        "salt a again": _generate([LONG], salt="a"),
        "salt b": _generate([LONG], salt="b"),
        "no salt": _generate([LONG]),
        "salt a evicted": _generate([LONG], salt="a"),
        "reset touched": reset,
        "touch a": _generate([LONG], salt="a"),
        "touch b": _generate([LONG], salt="b"),
        "touch a again": _generate([LONG], salt="a"),
        "touch c": _generate([LONG], salt="c"),
        "touched": _generate([LONG], salt="a"),
        "reset twins": reset,
        **{f"alone {place}": _generate([prompt], CROWDED) for place, prompt in enumerate(CROWD)},
        "reset crowd": reset,
        "calm": {"do": "metrics", "contains": "preemptions"},
        "crowd": _generate(CROWD, CROWDED),
        "preemptions": {"do": "metrics", "contains": "preemptions"},
        "reset crowded": reset,
        "twins": _generate([PROMPTS[1], PROMPTS[1]]),
        "hashes": {"do": "hashes"},
        "breakpoint": {"do": "rpc", "method": "stop_here", "args": []},
        "reset again": reset,
        "poison": {"do": "rpc", "method": "fill_cache_with_nan", "args": []},
        "poisoned": _generate(PROMPTS),
        "load": load[0],
        "reset loaded": reset,
        "loaded": _generate(PROMPTS),
        "load back": load[1],
        "reset back": reset,
        "back": _generate(PROMPTS),
    }
    engine = {
        "worker_extension_cls": "worker_extension.TrainerExtension",
        "generation_config": "vllm",
        "num_gpu_blocks_override": BLOCKS,
        "structured_outputs_config": NO_SPACES,
    }
    (run,) = start_features((model, list(named.values()), engine), **RUNNERS[request.param], **STOPS).result()["runs"]
    assert run["report"]["model_runner"] == request.param
    return {**dict(zip(named, run["steps"], strict=True)), "report": run["report"]}


@pytest.fixture(scope="module")
def logits(model: Path) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Token ids → Hugging Face's logits of the next token, in float32."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @cache
    def of(ids: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return network(torch.tensor([ids])).logits[0, -1]

    return of


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


def test_our_operators_did_all_of_this(results: dict[str, Any]) -> None:
    operators = {key.split(" ")[0] for key in results["report"]["counts"]}
    assert {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"} <= operators
    assert results["report"]["native_layers"] == {}


def test_the_recommendation_of_a_checkpoint_can_be_left_out(results: dict[str, Any]) -> None:
    assert results["defaults"] == {"temperature": 1.0, "top_k": 0}


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_logprobs_equal_hugging_face(
    results: dict[str, Any], logits: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    for prompt, output in zip(PROMPTS[:2], results["greedy"], strict=False):
        tokens = output["tokens"][0]
        for place, found in enumerate(output["logprobs"][0]):
            expected = logits((*prompt, *tokens[:place])).log_softmax(-1)
            best = expected.topk(5).indices.tolist()
            assert sorted(map(int, found)) == sorted(best)
            assert all(math.isclose(value, expected[int(token)], abs_tol=1e-3) for token, value in found.items())


def test_a_seed_makes_sampling_reproducible_alone_and_in_a_batch(results: dict[str, Any]) -> None:
    seeded = _tokens(results["seeded"])
    assert _tokens(results["seeded alone"]) == [seeded[1]]
    assert _tokens(results["another seed"])[1] != seeded[1] != _tokens(results["greedy"])[1]


def test_parallel_samples_differ(results: dict[str, Any]) -> None:
    for output in results["parallel"]:
        first, second = output["tokens"]
        assert len(first) == len(second) == MAX_TOKENS
        assert first != second


def test_samples_follow_temperature_and_top_k(
    results: dict[str, Any], logits: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    best = (logits(tuple(PROMPTS[0])) / SPREAD["temperature"]).topk(TOP)
    drawn = torch.tensor([tokens[0] for tokens in results["spread"][0]["tokens"]])
    assert len(drawn) == SAMPLES
    found = (drawn[:, None] == best.indices).float().mean(dim=0)
    expected = best.values.softmax(-1)
    assert found.sum() == 1.0
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / SAMPLES).sqrt()).all()
    assert expected.max() < 0.9


def test_beam_search_finds_the_beams_of_hugging_faces_logits(
    results: dict[str, Any], logits: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    for prompt, found in zip(PROMPTS, results["beams"], strict=False):
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(DEPTH):
            longer = []
            for score, tokens in beams:
                best = logits((*prompt, *tokens)).log_softmax(-1).topk(2 * WIDTH)
                longer += [
                    (score + value, (*tokens, token))
                    for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ]
            beams = sorted(longer, reverse=True)[:WIDTH]
        assert [tuple(beam["tokens"]) for beam in found] == [tokens for _, tokens in beams]
        assert all(
            math.isclose(beam["logprob"], score, abs_tol=1e-2) for beam, (score, _) in zip(found, beams, strict=True)
        )


# -- structured output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_output_has_the_structure_that_was_asked_for(kind: str, results: dict[str, Any]) -> None:
    text = results["constrained"][list(CONSTRAINTS).index(kind)]["texts"][0]
    if kind == "choice":
        assert text in CONSTRAINTS["choice"]["choice"]
    elif kind == "regex":
        assert re.fullmatch(CONSTRAINTS["regex"]["regex"], text)
    else:
        value = json.loads(text)
        assert set(value) == {"color", "ready"}
        assert value["color"] in ("red", "green")
        assert isinstance(value["ready"], bool)
    assert not results["unconstrained"][0]["texts"][0].startswith(("alpha", "beta", "a", "b", "c", "{"))


# -- continuous batching ----------------------------------------------------------------------------------------------


def test_requests_that_join_and_leave_keep_every_token(
    results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    tokens = results["joined"]["tokens"]
    whole = expected("qwen3")
    for index in (0, 2, 3):
        assert tokens[f"request-{index}"] == whole[index]
    left = tokens["request-1"]
    assert 0 < len(left) < MAX_TOKENS
    assert left == whole[1][: len(left)]
    sizes = {len(running) for running in results["joined"]["together"]}
    assert {1, 2} <= sizes


def test_requests_that_had_to_give_their_blocks_away_keep_every_token(results: dict[str, Any]) -> None:
    assert set(results["calm"].values()) == {0}
    assert max(results["preemptions"].values()) > 0
    alone = [_tokens(results[f"alone {place}"])[0] for place in range(len(CROWD))]
    assert _tokens(results["crowd"]) == alone
    assert len(set(map(tuple, alone))) == len(CROWD)


# -- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_salt_shares_a_prefix_with_the_same_salt_only(
    results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    cached = {name: results[name][0]["cached"] for name in ("salt a", "salt a again", "salt b", "no salt")}
    assert cached == {"salt a": 0, "salt a again": (len(LONG) - 1) // 16 * 16, "salt b": 0, "no salt": 0}
    for name in (*cached, "salt a evicted"):
        assert _tokens(results[name]) == [expected("qwen3")[2]]


def test_the_end_of_the_oldest_prompt_is_evicted_first(results: dict[str, Any]) -> None:
    assert 0 < results["salt a evicted"][0]["cached"] < results["salt a again"][0]["cached"]


def test_a_hit_keeps_a_prompt_from_being_the_oldest(results: dict[str, Any]) -> None:
    assert results["touched"][0]["cached"] == results["touch a again"][0]["cached"] == (len(LONG) - 1) // 16 * 16


def test_the_same_block_of_two_requests_stays_twice(
    results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert _tokens(results["twins"]) == [expected("qwen3")[1]] * 2
    assert results["hashes"]["several"] > 0


def test_a_block_is_known_by_its_sha_256(results: dict[str, Any]) -> None:
    assert results["hashes"]["bytes"] == [hashlib.sha256().digest_size]


def test_a_breakpoint_in_the_worker_stops_the_process_that_asks(results: dict[str, Any]) -> None:
    assert results["breakpoint"] == [[results["report"]["pid"], "stop_here"]]


def test_layers_with_a_window_and_without_hit_together(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    steps = [{"do": "kv_groups"}, _generate([LONG]), _generate([LONG])]
    (run,) = start_features((checkpoint("gemma3"), steps, {})).result()["runs"]
    groups, first, second = run["steps"]
    assert {kind for kind, *_ in groups} == {"SlidingWindowSpec", "FullAttentionSpec"}
    assert [first[0]["cached"], second[0]["cached"]] == [0, (len(LONG) - 1) // 16 * 16]
    assert _tokens(first) == _tokens(second) == [expected("gemma3")[2]]


def test_no_token_depends_on_what_a_recycled_block_held(
    results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["poison"] == [3]
    assert _tokens(results["poisoned"]) == expected("qwen3")


# -- weights of a live engine -----------------------------------------------------------------------------------------


def test_new_weights_give_the_other_checkpoints_tokens_and_old_ones_come_back(
    results: dict[str, Any], other: Path, expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["load"][0] > 0
    assert _tokens(results["loaded"]) == expected_tokens(other)
    assert _tokens(results["back"]) == expected("qwen3") != _tokens(results["loaded"])
