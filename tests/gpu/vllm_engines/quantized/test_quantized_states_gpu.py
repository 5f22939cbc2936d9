"""Quantized models with layers that keep a state on a GPU, eagerly and from graphs, in float32, by our kernels.

As ``tests/vllm/quantization/test_quantized_states.py``, with delta nets beside attention and a state space.
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
from quantized_checkpoints import SCHEMES
from quantized_engines import Rules, comparisons
from quantized_mixture import experts_kernel, operator
from quantized_network import Comparison, answered
from quantized_states import EXPERT_LAYERS, PRODUCTS, Run, build
from vllm_fl.layers import delta_net, mamba2

pytestmark = pytest.mark.gpu
UNIT = 2.0**-22
"""The rounding of a sum: matrix units cut off what they add, so right results may be farther apart than on a CPU."""
EAGER: Mapping[str, Any] = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 << 20,
}
GRAPHS = {**EAGER, "enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
RUNS = [
    Run("fp8", EAGER, "eager", "qwen3_5"),
    Run("fp8", GRAPHS, "graphs", "qwen3_5"),
    Run("fp8, blocks of 128", EAGER, "eager", "qwen3_next"),
    Run("fp8, blocks of 128", GRAPHS, "graphs", "qwen3_next"),
    Run("awq", GRAPHS, "graphs", "qwen3_next"),
    Run("compressed-tensors W8A8 int8", GRAPHS, "graphs", "mamba2"),
]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)
OPERATORS = {"qwen3_5": delta_net.OPERATORS, "qwen3_next": delta_net.OPERATORS, "mamba2": mamba2.OPERATORS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("states")
    return cache(lambda name: build(name, folder / name))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model: Callable[[str], Path]) -> Mapping[Run, Any]:
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def checkpoint(name: str, scheme: str) -> Path:
        place = folder / f"{name} {scheme}".replace(" ", "-")
        return checkpoints.write_checkpoint(place, SCHEMES[scheme], model=model(name))

    def begin(run: Run) -> Any:
        return start_features((checkpoint(run.model, run.scheme), [SCORED_STEP], run.engine), **NEUTRAL)

    return Runs({run: begin(run) for run in RUNS})


@pytest.fixture(scope="module")
def compared(results: Mapping[Run, Any], model: Callable[[str], Path]) -> Callable[[Run], Comparison]:
    @cache
    def beside(name: str) -> Callable[[Any], Comparison]:
        return comparisons(lambda run: answered(PROMPTS, results[run]["runs"][0]["steps"][0]), model(name), UNIT)

    return lambda run: beside(run.model)(run)


@each_run
class TestNumbers(Rules):
    """They are right."""


@each_run
def test_products_states_and_experts_run_by_our_kernels(run: Run, results: Mapping[Run, Any]) -> None:
    (found,) = results[run]["runs"]
    report, experts = found["report"], EXPERT_LAYERS.get(run.model, 0)
    assert report["layers"][run.made.layer] == PRODUCTS[run.model]
    assert report["layers"].get(experts_kernel(run.scheme), 0) == experts
    assert (report["native_layers"], report["failed"]) == ({}, {})
    operators = (*run.made.operators, *OPERATORS[run.model], *([operator(run.made)] if experts else []))
    prompts = [name for name in operators if not name.endswith("update")]
    for name in operators if run.engine["enforce_eager"] else prompts:  # in a graph a replay is no call
        assert ran(found, name) == {"default.triton"}, name
