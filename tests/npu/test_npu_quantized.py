"""Quantized checkpoints in vLLM on ``npu:0``: all products by ``vendor.ascend``, no documented rule of the chip waived.

W8A8 runs at every commit, with one of the others, which the commit draws. How results are compared in half precision
says :mod:`half_on_npu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from chip_engines import LLAMA, STEP, counts, start

import quantized_checkpoints as checkpoints
from half_on_npu import INTEGER_SCHEMES, W8A8, as_near_as_dequantized, quantized_kernels
from processes import Runs
from quantized_checkpoints import SCHEMES
from quantized_network import answered
from running import PROMPTS
from sampling import drawn

DRAWN = [W8A8, *drawn(INTEGER_SCHEMES, 1, "quantized checkpoints on the NPU")]
PRODUCTS = 4 * 4
"""Those of a layer, merged as vLLM does, in all layers."""
FEW = 4
"""Tokens that an engine with a wrong kernel generates for each prompt."""
each_scheme = pytest.mark.parametrize("name", DRAWN)
WRONG = [(name, kernel) for name in DRAWN for kernel in quantized_kernels(name)]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, npu_environment: Callable[..., dict[str, str]]
) -> Mapping[str, Any]:
    """A right pass, then one with each wrong kernel."""
    folder = tmp_path_factory.mktemp("quantized")

    def run(name: str) -> Any:
        model = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name])
        wrong = [{**STEP, "max_tokens": FEW, "wrong": kernel, "reset": True} for kernel in quantized_kernels(name)]
        return start(model, "float16", [{**STEP, "scores": True}, *wrong], npu_environment())

    return Runs({name: run(name) for name in DRAWN})


@each_scheme
def test_it_is_as_near_to_the_dequantized_network_as_hugging_faces(name: str, results: Mapping[str, Any]) -> None:
    assert as_near_as_dequantized(SCHEMES[name], *answered(PROMPTS, results[name]["steps"][0]["answers"]))


@each_scheme
def test_its_products_are_all_the_vendors(name: str, results: Mapping[str, Any]) -> None:
    report, operators = results[name]["report"], {*LLAMA - {"linear"}, *SCHEMES[name].operators}
    assert counts(report) == {operator: {"vendor.ascend"} for operator in operators}
    assert report["layers"][SCHEMES[name].layer] == PRODUCTS
    assert (report["native_layers"], report["failed"]) == ({}, {})


@each_scheme
def test_each_product_makes_the_calls_that_the_backend_documents(name: str, results: Mapping[str, Any]) -> None:
    step = results[name]["steps"][0]
    products = 4 * step["kernels"]["npu_fused_infer_attention_score"]
    assert {step["kernels"][kernel] for kernel in quantized_kernels(name)} == {products}
    assert "npu_linear" not in step["kernels"]
    assert step["waits"] == {}


@pytest.mark.parametrize(("name", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(name: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, *wrong = results[name]["steps"]
    step = wrong[quantized_kernels(name).index(kernel)]
    assert step["cached"] == [0] * len(PROMPTS), "it would read what a right kernel wrote"
    assert step["kernels"][kernel] > 0
    assert step["tokens"] != [tokens[:FEW] for tokens in right["tokens"]]
