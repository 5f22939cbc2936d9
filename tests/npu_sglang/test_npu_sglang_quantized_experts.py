"""Quantized experts in SGLang on ``npu:0``: by ``vendor.ascend``.

The commit draws one of the checkpoints whose experts are served, and one of those that are refused. How results are
compared in half precision says :mod:`half_on_npu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run

import quantized_checkpoints as checkpoints
from half_on_npu import EXPERTS, FEW, HEADS, REFUSED_EXPERTS, as_near_as_dequantized, expert_kernels
from processes import Runs, pool
from quantized_checkpoints import SCHEMES
from quantized_mixture import LAYERS, mixture, operator
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

OTHERS = {"rms_norm", "rotary_embedding", "kv_cache_write", "paged_attention", "topk_softmax", "linear"}
"""The operators beside products and experts; ``linear`` is the router's product."""
DRAWN = drawn(EXPERTS, 1, "quantized experts of SGLang on the NPU")
REFUSED = drawn(list(REFUSED_EXPERTS), 1, "quantized experts that SGLang refuses on the NPU")
each_scheme = pytest.mark.parametrize("name", DRAWN)
WRONG = [(name, kernel) for name in DRAWN for kernel in expert_kernels(name)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("experts") / "whole", **HEADS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Mapping[str, Any]:
    """A right pass, then one with each wrong kernel; or an engine that does not start."""
    folder = tmp_path_factory.mktemp("quantized")
    variables = {"SGLANG_FL_PLUGIN_MODULES": "wrong_kernels", "SGLANG_FL_PREFER": "vendor"}

    def start(name: str, steps: list[Mapping[str, Any]]) -> Any:
        checkpoint = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model)
        return pool.submit(run, checkpoint, steps, {"dtype": "float16"}, **variables)

    def served(name: str) -> Any:
        right = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "scores": True}
        wrong = [{"prompts": PROMPTS, "max_tokens": FEW, "wrong": kernel} for kernel in expert_kernels(name)]
        return start(name, [right, *wrong])

    return Runs({**{name: served(name) for name in DRAWN}, **{name: start(name, []) for name in REFUSED}})


@each_scheme
def test_it_is_as_near_to_the_dequantized_network_as_hugging_faces(
    name: str, results: Mapping[str, Any], model: Path
) -> None:
    step = results[name]["steps"][0]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, step["tokens"], strict=True)]
    got = torch.tensor([score for scores in step["scores"] for score in scores])
    assert len(got) == sum(len(text) - 1 for text in texts)
    assert as_near_as_dequantized(SCHEMES[name], texts, got, model)


@each_scheme
def test_its_products_and_experts_are_all_the_vendors(name: str, results: Mapping[str, Any]) -> None:
    report = results[name]["report"]
    ran = {tuple(key.split(" ")) for key in report["counts"]}
    operators = {*OTHERS, *SCHEMES[name].operators, operator(SCHEMES[name])}
    assert ran == {(one, "vendor.ascend") for one in operators}
    assert LAYERS in report["layers"].values()
    assert (report["native_layers"], report["failed"]) == ({}, {})


@pytest.mark.parametrize(("name", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(name: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, *wrong = results[name]["steps"]
    step = wrong[expert_kernels(name).index(kernel)]
    assert step["cached"] == [0] * len(PROMPTS), "it would read what a right kernel wrote"
    assert step["tokens"] != [tokens[:FEW] for tokens in right["tokens"]]


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_no_kernel_takes_end_the_start_with_the_reason(name: str, results: Mapping[str, Any]) -> None:
    with pytest.raises(AssertionError, match=f"sglang_fl does not support these experts .*{REFUSED_EXPERTS[name]}"):
        results[name]
