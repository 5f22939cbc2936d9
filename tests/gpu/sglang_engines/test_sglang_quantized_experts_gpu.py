"""Quantized experts in SGLang on a GPU, from graphs: what the dequantized network computes, by our kernels.

The products of attention are quantized too, so blocks of fp8 and AWQ are here in linear layers as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, STEP, all_is_ours, answered, replayed, start, texts

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from quantized_mixture import LAYERS, mixture, operator
from quantized_network import Comparison, computed, network
from running import MAX_TOKENS, PROMPTS, ran

pytestmark = pytest.mark.gpu
NAMES = {"fp8, blocks of 128": "Fp8Block", "awq": "Awq"}
"""Schemes, and how the names of our layers begin."""
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("experts") / "whole")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], dict[str, Any]]:
    folder, runs = tmp_path_factory.mktemp("quantized"), {}
    for name in NAMES:
        path = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model)
        runs[name] = start(path, {**STEP, "scores": True}, STEP, variables=NEUTRAL)
    return lambda name: runs[name].result()


@each
def test_it_computes_what_the_dequantized_network_does(
    name: str, answers: Callable[[str], dict[str, Any]], model: Path
) -> None:
    compared = Comparison.of(*answered(PROMPTS, answers(name)["steps"][0]), SCHEMES[name], 1, model)
    assert compared.error <= compared.right.rounding
    assert compared.quantization > compared.right.rounding, "rounding hides the quantization"
    assert compared.right.decides(PROMPTS, MAX_TOKENS)


@each
def test_answers_to_prompts_that_are_in_the_cache_are_the_networks_too(
    name: str, answers: Callable[[str], dict[str, Any]], model: Path
) -> None:
    """Other kernels read fewer new tokens, so rounding may decide otherwise than in the first pass."""
    _, again = answers(name)["steps"]
    assert max(again["cached"]) > 0
    assert computed(network(SCHEMES[name], model=model), texts(again)).decides(PROMPTS, MAX_TOKENS)


@each
def test_experts_and_attention_are_ours_and_so_are_their_kernels(
    name: str, answers: Callable[[str], dict[str, Any]]
) -> None:
    found, begin = answers(name), NAMES[name]
    layers = found["report"]["layers"]
    assert (layers[f"{begin}Experts"], layers[f"{begin}Layer"]) == (LAYERS, 2 * LAYERS)
    assert all_is_ours(found["report"])
    assert all(ran(found, one) == OURS for one in (operator(SCHEMES[name]), *SCHEMES[name].operators))
    assert not ran(found, "fused_moe")


@each
def test_decoding_replays_graphs_of_what_was_met_before(name: str, answers: Callable[[str], dict[str, Any]]) -> None:
    found = answers(name)
    assert replayed(found["report"], 2 * (MAX_TOKENS - 1))
    assert ", 0 of products" not in found["log"]
    assert "default.triton" in str(found["report"]["manifest"]["choices"][operator(SCHEMES[name])])
