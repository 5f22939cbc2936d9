"""Quantized experts in vLLM on ``npu:0``: by ``vendor.ascend``, no documented rule of the chip waived.

The commit draws one of the checkpoints whose experts are served, and one of those that are refused. How results are
compared in half precision says :mod:`half_on_npu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chip_engines import LLAMA, STEP, counts, start

import quantized_checkpoints as checkpoints
from half_on_npu import EXPERTS, FEW, HEADS, REFUSED_EXPERTS, as_near_as_dequantized, expert_kernels
from processes import Runs
from quantized_checkpoints import SCHEMES
from quantized_mixture import LAYERS, experts_kernel, mixture, operator
from quantized_network import answered
from running import PROMPTS
from sampling import drawn

DRAWN = drawn(EXPERTS, 1, "quantized experts on the NPU")
REFUSED = drawn(list(REFUSED_EXPERTS), 1, "quantized experts that the NPU refuses")
each_scheme = pytest.mark.parametrize("name", DRAWN)
WRONG = [(name, kernel) for name in DRAWN for kernel in expert_kernels(name)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("experts") / "whole", **HEADS)


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, npu_environment: Callable[..., dict[str, str]], model: Path
) -> Mapping[str, Any]:
    """A right pass, then one with each wrong kernel; or an engine that does not start."""
    folder = tmp_path_factory.mktemp("quantized")

    def run(name: str, steps: list[Mapping[str, Any]]) -> Any:
        checkpoint = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model)
        return start(checkpoint, "float16", steps, npu_environment())

    def served(name: str) -> Any:
        wrong = [{**STEP, "max_tokens": FEW, "wrong": kernel, "reset": True} for kernel in expert_kernels(name)]
        return run(name, [{**STEP, "scores": True}, *wrong])

    return Runs({**{name: served(name) for name in DRAWN}, **{name: run(name, []) for name in REFUSED}})


@each_scheme
def test_it_is_as_near_to_the_dequantized_network_as_hugging_faces(
    name: str, results: Mapping[str, Any], model: Path
) -> None:
    assert as_near_as_dequantized(SCHEMES[name], *answered(PROMPTS, results[name]["steps"][0]["answers"]), model)


@each_scheme
def test_its_products_and_experts_are_all_the_vendors(name: str, results: Mapping[str, Any]) -> None:
    report = results[name]["report"]
    operators = {*LLAMA - {"linear", "silu_and_mul"}, "topk_softmax", *SCHEMES[name].operators, operator(SCHEMES[name])}
    assert counts(report) == {one: {"vendor.ascend"} for one in operators}
    assert report["layers"][experts_kernel(name)] == LAYERS
    assert (report["native_layers"], report["failed"]) == ({}, {})


@each_scheme
def test_each_layer_makes_the_calls_that_the_backend_documents(name: str, results: Mapping[str, Any]) -> None:
    step = results[name]["steps"][0]
    layers = step["kernels"]["npu_fused_infer_attention_score"]
    for kernel in expert_kernels(name):
        assert step["kernels"][kernel] == layers * (2 if kernel == "npu_grouped_matmul" else 1)
    assert step["waits"] == {}


@pytest.mark.parametrize(("name", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(name: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, *wrong = results[name]["steps"]
    step = wrong[expert_kernels(name).index(kernel)]
    assert step["cached"] == [0] * len(PROMPTS), "it would read what a right kernel wrote"
    assert step["tokens"] != [tokens[:FEW] for tokens in right["tokens"]]


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_no_kernel_takes_end_the_start_with_the_reason(name: str, results: Mapping[str, Any]) -> None:
    with pytest.raises(AssertionError, match=f"vllm_fl does not support these experts .*{REFUSED_EXPERTS[name]}"):
        results[name]
