"""Quantized checkpoints in SGLang on ``npu:0``: all products of their layers by ``vendor.ascend``.

The commit draws one of those that :mod:`half_on_npu` names, which also says how results are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from engines import run

import quantized_checkpoints as checkpoints
from half_on_npu import INTEGER_SCHEMES, W8A8, as_near_as_dequantized, quantized_kernels
from processes import Runs, pool
from quantized_checkpoints import SCHEMES
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

DENSE = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
PRODUCTS = 4 * 4
"""Those of a layer, merged as SGLang does, in all layers."""
FEW = 4
"""Tokens that an engine with a wrong kernel generates for each prompt."""
DRAWN = drawn([W8A8, *INTEGER_SCHEMES], 1, "quantized checkpoints of SGLang on the NPU")
WRONG = [(name, kernel) for name in DRAWN for kernel in quantized_kernels(name)]
each_scheme = pytest.mark.parametrize("name", DRAWN)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A right pass, then one with each wrong kernel."""
    folder = tmp_path_factory.mktemp("quantized")
    variables = {"SGLANG_FL_PLUGIN_MODULES": "wrong_kernels", "SGLANG_FL_PREFER": "vendor"}

    def start(name: str) -> Any:
        model = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name])
        right = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "scores": True}
        wrong = [{"prompts": PROMPTS, "max_tokens": FEW, "wrong": kernel} for kernel in quantized_kernels(name)]
        return pool.submit(run, model, [right, *wrong], {"dtype": "float16"}, **variables)

    return Runs({name: start(name) for name in DRAWN})


@each_scheme
def test_it_is_as_near_to_the_dequantized_network_as_hugging_faces(name: str, results: Mapping[str, Any]) -> None:
    step = results[name]["steps"][0]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, step["tokens"], strict=True)]
    got = torch.tensor([score for scores in step["scores"] for score in scores])
    assert len(got) == sum(len(text) - 1 for text in texts)
    assert as_near_as_dequantized(SCHEMES[name], texts, got)


@each_scheme
def test_its_products_are_all_the_vendors(name: str, results: Mapping[str, Any]) -> None:
    report = results[name]["report"]
    ran = {tuple(key.split(" ")) for key in report["counts"]}
    assert ran == {(operator, "vendor.ascend") for operator in {*DENSE, *SCHEMES[name].operators}}
    assert PRODUCTS in report["layers"].values()
    assert (report["native_layers"], report["failed"]) == ({}, {})


@pytest.mark.parametrize(("name", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(name: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, *wrong = results[name]["steps"]
    step = wrong[quantized_kernels(name).index(kernel)]
    assert step["cached"] == [0] * len(PROMPTS), "it would read what a right kernel wrote"
    assert step["tokens"] != [tokens[:FEW] for tokens in right["tokens"]]
