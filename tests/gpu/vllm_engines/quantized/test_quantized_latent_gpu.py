"""Quantized latent attention on a GPU: what the dequantized network computes, within its own rounding.

As ``test_quantized_latent.py``. A process for each engine, so that one which fails takes no other along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import PROMPTS, SCORED_STEP, Runs, ran, start_features

import quantized_checkpoints as checkpoints
from quantized_engines import Rules, Run, comparisons
from quantized_mixture import DEEPSEEK_HEADS, LATENT_LAYERS, LATENT_PRODUCTS, experts_kernel, latent, operator
from quantized_network import Comparison, answered, distance, is_as_near, network, scores

pytestmark = pytest.mark.gpu
LATENT = ("kv_cache_write", "mla_decode", "mla_prefill")
BLOCKS = "fp8, blocks of 128"
UNIT = 2.0**-22
"""The rounding of a sum: matrix units cut off what they add, so right results may be farther apart than on a CPU."""
ENGINE: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "enable_prefix_caching": False,
}
GRAPHS = {
    **ENGINE,
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
}
HALF = {**GRAPHS, "dtype": "bfloat16"}
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
SHIPPED: Mapping[str, str] = {}

FINE = [
    Run(BLOCKS, ENGINE, "eager"),
    Run(BLOCKS, GRAPHS, "graphs"),
    Run("gptq", GRAPHS, "graphs"),
    Run("compressed-tensors W8A8 fp8", GRAPHS, "graphs"),
    Run("awq", ENGINE, "eager"),
]
"""In float32, by our kernels."""
COARSE = Run("compressed-tensors W8A8 int8", GRAPHS, "graphs")
"""Likewise; here rounding moves this model's answers about as far as the quantization does."""
IN_HALF = [Run(BLOCKS, HALF, "bfloat16"), Run("gptq", HALF, "bfloat16")]
"""By what a GPU chooses if nothing is said, with heads as DeepSeek has them."""
RUNS = [*FINE, COARSE, *IN_HALF]
each = pytest.mark.parametrize("run", RUNS, ids=str)
each_single = pytest.mark.parametrize("run", [*FINE, COARSE], ids=str)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Path]:
    folder = tmp_path_factory.mktemp("latent")
    made = {"small": latent(folder / "small"), "real": latent(folder / "real", **DEEPSEEK_HEADS)}
    return lambda run: made["real" if run in IN_HALF else "small"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Callable[[Run], Path]) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("quantized")

    def start(run: Run, place: int) -> Any:
        path = checkpoints.write_checkpoint(folder / str(place), run.made, model=model(run))
        return start_features((path, [SCORED_STEP], run.engine), **(SHIPPED if run in IN_HALF else OURS))

    return Runs({str(run): start(run, place) for place, run in enumerate(RUNS)})


@pytest.fixture(scope="module")
def answer(answers: Mapping[str, Any]) -> Callable[[Run], Any]:
    return lambda run: answers[str(run)]["runs"][0]


@pytest.fixture(scope="module")
def compared(answer: Callable[[Run], Any], model: Callable[[Run], Path]) -> Callable[[Run], Comparison]:
    @cache
    def of(run: Run) -> Comparison:
        found = comparisons(lambda one: answered(PROMPTS, answer(one)["steps"][0]), model(run), UNIT)(run)
        print(f"{run}: error {found.error}, rounding {found.right.rounding}, quantization {found.quantization}")
        return found

    return of


@pytest.mark.parametrize("run", FINE, ids=str)
class TestNumbers(Rules):
    """They are right."""


def test_a_coarse_quantization_is_nearer_to_its_own_network(compared: Callable[[Run], Comparison]) -> None:
    found = compared(COARSE)
    assert found.error <= found.right.rounding
    assert found.error < found.quantization


@pytest.mark.parametrize("run", IN_HALF, ids=str)
def test_in_bfloat16_it_is_about_as_near_as_hugging_faces_network(
    run: Run, answer: Callable[[Run], Any], model: Callable[[Run], Path]
) -> None:
    texts, got = answered(PROMPTS, answer(run)["steps"][0])
    exact, half = (scores(network(run.made, 1, dtype, model(run)), texts) for dtype in (torch.float32, torch.bfloat16))
    ours, theirs, plain = (
        distance(got, others) for others in (exact, half, scores(network(None, model=model(run)), texts))
    )
    print(f"{run}: {ours} from float32, {theirs} from bfloat16, {plain} from the network that is not quantized")
    assert is_as_near(got, exact, half)
    assert ours < plain


@each
def test_its_products_and_experts_are_all_ours(run: Run, answer: Callable[[Run], Any]) -> None:
    report = answer(run)["report"]
    assert report["layers"][run.made.layer] == LATENT_PRODUCTS
    assert report["layers"][experts_kernel(run.scheme)] == LATENT_LAYERS - 1
    assert report["attention"] == {"MLAFLImpl": LATENT_LAYERS}
    assert report["native_layers"] == {}
    assert report["failed"] == {}


@each_single
def test_our_kernels_compute_it(run: Run, answer: Callable[[Run], Any]) -> None:
    for name in (*run.made.operators, operator(run.made), *LATENT):
        assert ran(answer(run), name) == {"default.triton"}, name


@pytest.mark.parametrize("run", IN_HALF, ids=str)
def test_no_reference_computes_it(run: Run, answer: Callable[[Run], Any]) -> None:
    for name in (*run.made.operators, operator(run.made), *LATENT):
        found = ran(answer(run), name)
        assert found, name
        assert "reference.torch" not in found, name


@each
def test_it_is_compiled_if_it_was_asked_for(run: Run, answer: Callable[[Run], Any]) -> None:
    compiled = answer(run)["report"]["compiled"]
    assert (compiled and compiled["mode"]) == (None if run.engine is ENGINE else "VLLM_COMPILE")
