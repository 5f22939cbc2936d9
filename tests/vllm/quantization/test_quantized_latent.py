"""Quantized models with latent attention in engines: what the dequantized network computes, within its own rounding.

As :mod:`test_quantized`, with the DeepSeek-V3 of :mod:`quantized_mixture`. The absorbed form of decoding takes the
weight of ``kv_b_proj`` dequantized, so steps of one token do not quantize its input (:mod:`quantized_network`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SCORED_STEP, WRONG_IF_ASKED, ran, start_features

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, Run, comparisons
from quantized_mixture import EXPERTS, LATENT_LAYERS, LATENT_PRODUCTS, experts_kernel, latent, operator
from quantized_network import Comparison, answered
from sampling import drawn

pytestmark = pytest.mark.engine
LATENT = ("kv_cache_write", "mla_decode", "mla_prefill")
BLOCKS = "fp8, blocks of 128"
STATIC = "fp8, static"

FINE = [name for name in EXPERTS if "weight_only_linear" in SCHEMES[name].operators]
"""Schemes that leave inputs as they are, so that engine and network are so near that a small mistake shows."""
OTHERS = [name for name in EXPERTS if name not in (*FINE, BLOCKS) and "static" not in name]

EAGER = [
    Run(name, kind="eager") for name in (BLOCKS, *drawn(FINE, 1, "latent, fine"), *drawn(OTHERS, 0, "latent, others"))
]
COMPILED = [Run(BLOCKS, {"enforce_eager": False}, "compiled")]
RANKS = [Run(BLOCKS, {"tensor_parallel_size": 2}, "two ranks")]
RUNS = [*EAGER, *drawn([*COMPILED, *RANKS], 1, "latent, compiled and ranks")]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


def steps(run: Run) -> list[Mapping[str, Any]]:
    """A right pass; and where choices are not frozen, one with a wrong implementation of the products."""
    wrong = {"do": "policy", "prefer": "reference", "per_op_order": {run.made.operators[-1]: ["impl:vendor.wrong"]}}
    return [SCORED_STEP, *(({"do": "reset_prefix_cache"}, wrong, SCORED_STEP) if run in EAGER else ())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent(tmp_path_factory.mktemp("latent") / "whole")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("quantized")
    return cache(lambda name: checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model))


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Path]) -> dict[Run, Any]:
    found = start_features(
        *((checkpoint(run.scheme), steps(run), run.engine) for run in RUNS), **WRONG_IF_ASKED
    ).result()
    return dict(zip(RUNS, found["runs"], strict=True))


@pytest.fixture(scope="module")
def compared(answers: dict[Run, Any], model: Path) -> Callable[[Run], Comparison]:
    return comparisons(lambda run: answered(PROMPTS, answers[run]["steps"][0]), model)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_its_products_and_experts_are_all_ours(run: Run, answers: dict[Run, Any]) -> None:
    report = answers[run]["report"]
    assert report["layers"][run.made.layer] == LATENT_PRODUCTS
    assert report["layers"][experts_kernel(run.scheme)] == LATENT_LAYERS - 1
    assert report["attention"] == {"MLAFLImpl": LATENT_LAYERS}
    assert not report["native_layers"]
    assert all(
        ran(answers[run], name) - {"vendor.wrong"} for name in (*run.made.operators, *LATENT, operator(run.made))
    )


@pytest.mark.parametrize("run", EAGER, ids=str)
def test_a_wrong_product_changes_what_it_computes(run: Run, answers: dict[Run, Any]) -> None:
    first, wrong = (step for step in answers[run]["steps"] if isinstance(step, list))
    assert [one["tokens"] for one in wrong] != [one["tokens"] for one in first]


def test_scales_for_inputs_are_refused(checkpoint: Callable[[str], Path]) -> None:
    """vLLM finds the weight of ``kv_b_proj`` by a product, whose input such a scale would round."""
    with pytest.raises(AssertionError, match="latent attention with scales for inputs in the checkpoint yet"):
        start_features((checkpoint(STATIC), [SCORED_STEP], {})).result()
