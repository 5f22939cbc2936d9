"""Quantized models in SGLang on a GPU, from graphs: what the dequantized network computes, by our kernels.

One checkpoint has a scheme of ``compressed-tensors`` for each layer; for the other one SGLang has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, STEP, all_is_ours, answered, replayed, start, texts

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES, Scheme
from quantized_network import Comparison, computed, network
from running import MAX_TOKENS, PROMPTS, ran

pytestmark = pytest.mark.gpu
MIXED = ("compressed-tensors W8A8 int8", "compressed-tensors W8A8 fp8", "compressed-tensors W4A16, zero points")
MADE: Mapping[str, Scheme] = {
    "a scheme a layer": checkpoints.layered(*MIXED, "compressed-tensors W8A16 fp8"),
    "gptq": SCHEMES["gptq"],
}
PRODUCTS = 4
"""Those of a layer, merged as SGLang does."""
LAYERS = {
    "a scheme a layer": dict.fromkeys(("Int8Layer", "Fp8Layer", "PackedLayer", "Fp8WeightLayer"), PRODUCTS),
    "gptq": {"GptqLayer": 4 * PRODUCTS},
}
each = pytest.mark.parametrize("name", MADE)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """An engine's answers, and those that it gives when it finds the prompts in its cache."""
    folder = tmp_path_factory.mktemp("quantized")
    paths = {name: checkpoints.write_checkpoint(folder / name.replace(" ", "-"), made) for name, made in MADE.items()}
    runs = {name: start(path, {**STEP, "scores": True}, STEP, variables=NEUTRAL) for name, path in paths.items()}
    return lambda name: runs[name].result()


@each
def test_it_computes_what_the_dequantized_network_does(name: str, answers: Callable[[str], dict[str, Any]]) -> None:
    compared = Comparison.of(*answered(PROMPTS, answers(name)["steps"][0]), MADE[name], 1)
    assert compared.error <= compared.right.rounding
    assert compared.quantization > compared.right.rounding, "rounding hides the quantization"
    assert compared.right.decides(PROMPTS, MAX_TOKENS)


@each
def test_answers_to_prompts_that_are_in_the_cache_are_the_networks_too(
    name: str, answers: Callable[[str], dict[str, Any]]
) -> None:
    """Other kernels read fewer new tokens, so rounding may decide otherwise than in the first pass."""
    _, again = answers(name)["steps"]
    assert max(again["cached"]) > 0
    assert computed(network(MADE[name]), texts(again)).decides(PROMPTS, MAX_TOKENS)


@each
def test_every_product_is_ours_and_so_is_its_kernel(name: str, answers: Callable[[str], dict[str, Any]]) -> None:
    found = answers(name)
    layers = found["report"]["layers"]
    assert {layer: layers[layer] for layer in LAYERS[name]} == LAYERS[name]
    assert all_is_ours(found["report"])
    assert all(ran(found, operator) == OURS for operator in (*MADE[name].operators, "paged_attention"))


@each
def test_decoding_replays_graphs_of_products_that_were_met_before(
    name: str, answers: Callable[[str], dict[str, Any]]
) -> None:
    found = answers(name)
    assert replayed(found["report"], 2 * (MAX_TOKENS - 1))
    assert " of products" in found["log"]
    assert ", 0 of products" not in found["log"]
    for operator in MADE[name].operators:
        assert "default.triton" in str(found["report"]["manifest"]["choices"][operator])
