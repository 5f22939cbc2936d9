"""A latent cache in fp8: an engine computes what Hugging Face's network does whose latents are rounded so.

A step of several tokens of a request reads their own latents as they are, and those before them from the cache; a step
of one token reads all of them from the cache. One request runs at a time, so each step's tokens are known. Layers have
scales of their own, which are set in the engine, because no checkpoint that vLLM serves here brings any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features
from torch import Tensor

from quantized_mixture import LATENT_LAYERS, latent
from quantized_network import Computed, answered, computed, distance, network, scores, with_fp8_latents

pytestmark = pytest.mark.engine
OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill")
CHUNK, BLOCK = 64, 16
"""Tokens of a step at most, and of a block."""
SCALES = (0.011, 0.017, 0.023)
PLANTED = 1.1
"""A factor by which scales are wrong."""
AGAIN: Mapping[str, Any] = {**SCORED_STEP, "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0}}
"""Prompts whose log-probabilities are asked for are computed anew; these are found."""
ENGINE = {"kv_cache_dtype": "fp8", "max_num_seqs": 1, "max_num_batched_tokens": CHUNK}
EXTENDED = {**ENGINE, "worker_extension_cls": "worker_extension.TrainerExtension"}


class Run(NamedTuple):
    """An engine with such a cache: the layers' scales, and its arguments."""

    scales: tuple[float, ...]
    engine: Mapping[str, Any]


ONES, SCALED, COMPILED, HALF = "scales of 1", "a scale for each layer", "compiled", "bfloat16"
RUNS = {
    ONES: Run((1.0,) * LATENT_LAYERS, ENGINE),
    SCALED: Run(SCALES, EXTENDED),
    COMPILED: Run(SCALES, {**EXTENDED, "enforce_eager": False}),
    HALF: Run((1.0,) * LATENT_LAYERS, {**ENGINE, "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}),
}
SINGLE = [ONES, SCALED, COMPILED]
single = pytest.mark.parametrize("name", SINGLE)
each = pytest.mark.parametrize("name", RUNS)


def steps(name: str) -> list[Mapping[str, Any]]:
    """A right pass, one that finds its prompts in the cache; and with scales one that reads with others than it wrote.

    Where choices are not frozen, one for each operator with a wrong implementation follows.
    """
    made: list[Mapping[str, Any]] = [SCORED_STEP, AGAIN]
    if RUNS[name].scales == SCALES:
        made.insert(0, {"do": "rpc", "method": "set_latent_scales", "args": [SCALES]})
        made.append({"do": "rpc", "method": "set_latent_scales", "args": [[PLANTED * scale for scale in SCALES]]})
        made.append(AGAIN)
    for operator in OPERATORS if name == ONES else ():
        wrong = {"do": "policy", "prefer": "reference", "per_op_order": {operator: ["impl:vendor.wrong"]}}
        made += [{"do": "reset_prefix_cache"}, wrong, SCORED_STEP]
    return made


def own(tokens: int, cached: int = 0) -> list[int]:
    """For each token of a text, the first one whose latents its step reads as they are."""
    prompt = tokens - MAX_TOKENS
    chunks = range(0, cached, CHUNK), range(cached, prompt, CHUNK)
    ends = [*chunks[0][1:], cached, *chunks[1][1:], prompt][not cached :]
    firsts: list[int] = []
    for end in ends:
        begin = len(firsts)
        firsts += [begin if end - begin > 1 else end] * (end - begin)
    return [*firsts, *range(prompt + 1, tokens + 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent(tmp_path_factory.mktemp("latent") / "whole")


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, Any]:
    found = start_features(*((model, steps(name), run.engine) for name, run in RUNS.items()), **WRONG_IF_ASKED)
    return dict(zip(RUNS, found.result()["runs"], strict=True))


@pytest.fixture(scope="module")
def passes(answers: dict[str, Any]) -> Callable[[str], list[Any]]:
    """What the passes of a run answered."""
    return lambda name: [step for step in answers[name]["steps"] if isinstance(step, list) and step[0]]


@pytest.fixture(scope="module")
def right(model: Path, passes: Callable[[str], Any]) -> Callable[[str], tuple[list[list[int]], Tensor, Computed]]:
    """A run's texts, its log-probabilities, and what the network computes there."""

    @cache
    def of(name: str) -> tuple[list[list[int]], Tensor, Computed]:
        texts, got = answered(PROMPTS, passes(name)[0])
        return texts, got, computed(with_fp8_latents(network(None, model=model), RUNS[name].scales, own), texts)

    return of


def others(model: Path, scales: tuple[float, ...], texts: list[list[int]]) -> dict[str, Tensor]:
    """What networks with other caches give."""

    def made(scales: tuple[float, ...], own: Callable[[int], list[int]] = own) -> Tensor:
        return scores(with_fp8_latents(network(None, model=model), scales, own), texts)

    found = {
        "not quantized": scores(network(None, model=model), texts),
        "other scales": made(tuple(PLANTED * scale for scale in scales)),
        "a step's own latents rounded": made(scales, lambda tokens: [*range(1, tokens + 1)]),
    }
    return found if scales != SCALES else {**found, "scales of the layer before": made((scales[-1], *scales[:-1]))}


@single
def test_it_computes_what_the_network_with_rounded_latents_does(
    name: str, right: Callable[[str], Any], model: Path
) -> None:
    texts, got, there = right(name)
    assert distance(got, there.scores) <= there.rounding
    for other, wrong in others(model, RUNS[name].scales, texts).items():
        assert distance(got, wrong) > there.rounding, other
    assert there.decides(PROMPTS, MAX_TOKENS)


@single
def test_a_prompt_found_in_the_cache_is_read_as_it_was_stored(
    name: str, right: Callable[[str], Any], passes: Callable[[str], Any], model: Path
) -> None:
    """Prompts of one block and more: what they are read with, and answered from it; not so with other scales."""
    _, _, there = right(name)
    first, again, *planted = passes(name)[: 3 if RUNS[name].scales == SCALES else 2]
    assert [one["cached"] for one in first] == [0] * len(PROMPTS)
    assert [one["cached"] for one in again] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert behind(model, RUNS[name].scales, again) <= 2 * there.largest
    for wrong in planted:
        assert behind(model, RUNS[name].scales, wrong) > 2 * there.largest


def behind(model: Path, scales: tuple[float, ...], found: list[Any]) -> float:
    """The largest difference of answers' log-probabilities from those of a network that reads the same from a cache."""
    largest = 0.0
    for prompt, answer in zip(PROMPTS, found, strict=True):
        (tokens,), (given,) = answer["tokens"], answer["logprobs"]
        got = torch.tensor([step[str(token)] for token, step in zip(tokens, given, strict=True)])
        made = with_fp8_latents(network(None, model=model), scales, lambda n, c=answer["cached"]: own(n, c))
        largest = max(largest, float((got - scores(made, [[*prompt, *tokens]])[-MAX_TOKENS:]).abs().max()))
    return largest


def test_in_bfloat16_it_is_nearer_to_the_network_than_one_without_rounding(
    right: Callable[[str], Any], model: Path
) -> None:
    texts, got, there = right(HALF)
    assert distance(got, there.scores) < distance(got, scores(network(None, model=model), texts))


@each
def test_the_operators_ran_on_it(name: str, answers: dict[str, Any]) -> None:
    report = answers[name]["report"]
    assert all(ran(answers[name], operator) - {"vendor.wrong"} for operator in OPERATORS)
    assert report["attention"] == {"MLAFLImpl": LATENT_LAYERS}
    assert not report["native_layers"]
    assert not report["failed"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_implementation_changes_the_tokens(operator: str, passes: Callable[[str], Any]) -> None:
    first, _, *wrong = passes(ONES)
    assert [one["tokens"] for one in wrong[OPERATORS.index(operator)]] != [one["tokens"] for one in first]
