"""gpt-oss in vLLM as its checkpoint is published: the tokens of Transformers' network with dequantized experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import STEP, Runs, expected_tokens, ran, start
from safetensors.torch import load_file
from torch import Tensor

import gpt_oss

PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "wrong_plugin", "VLLM_FL_DENY_VENDORS": "wrong"}
WRONG = {"prefer": "reference", "per_op_order": {"weight_only_moe": ["impl:vendor.wrong"]}}
TWO = {"tensor_parallel_size": 2}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "one rank": {},
    "compiled": {"enforce_eager": False},
    "each expert divided": TWO,
    "the experts divided": {**TWO, "enable_expert_parallel": True},
}
LAYERS = 3

each = pytest.mark.parametrize("kind", KINDS)


def halved(name: str, stored: Tensor) -> Tensor:
    """The exponents of one expert's second product less by one."""
    if "layers.1." in name and name.endswith("down_proj_scales"):
        stored[2] -= 1
    return stored


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("gpt-oss")
    published = gpt_oss.write_checkpoint(root / "published")
    spoiled = gpt_oss.write_checkpoint(root / "spoiled", halved)
    return {"published": published, "spoiled": spoiled, "plain": gpt_oss.dequantized(published, root / "dequantized")}


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path]) -> Mapping[str, Any]:
    """The tokens of each kind, and with a wrong mixture and a spoiled checkpoint those of one."""
    made = {
        kind: start(models["published"], STEP, engine=dict(engine))
        for kind, engine in KINDS.items()
        if kind != "one rank"
    }
    wrong = {**STEP, "policy": WRONG, "reset": True}
    made["one rank"] = start(models["published"], STEP, wrong, variables=PLUGIN)
    return Runs({**made, "spoiled": start(models["spoiled"], STEP)})


@pytest.mark.engine
@each
def test_tokens_equal_those_of_the_dequantized_network(
    kind: str, results: Mapping[str, Any], models: Mapping[str, Path]
) -> None:
    assert results[kind]["steps"][0]["tokens"] == expected_tokens(models["plain"])


@pytest.mark.engine
def test_every_layer_that_could_run_our_operators_does(results: Mapping[str, Any]) -> None:
    report = results["one rank"]["report"]
    operators = {key.split(" ")[0] for key in report["counts"]}
    assert {"kv_cache_write", "paged_attention", "weight_only_moe"} <= operators
    assert "fused_moe" not in operators
    assert report["layers"].get("Float4Experts") == LAYERS
    assert report["native_layers"] == {}
    assert report["failed"] == {}


@pytest.mark.engine
def test_a_wrong_mixture_changes_the_tokens(results: Mapping[str, Any]) -> None:
    first, wrong = results["one rank"]["steps"]
    assert wrong["tokens"] != first["tokens"]
    assert "vendor.wrong" in ran(results["one rank"], "weight_only_moe")


@pytest.mark.engine
def test_a_scale_that_is_wrong_in_one_expert_changes_the_tokens(results: Mapping[str, Any]) -> None:
    assert results["spoiled"]["steps"][0]["tokens"] != results["one rank"]["steps"][0]["tokens"]


def test_the_checkpoint_has_what_the_published_one_has(models: Mapping[str, Path]) -> None:
    stored = load_file(models["published"] / "model.safetensors")
    experts = {
        name.rpartition(".")[2]: tuple(one.shape) for name, one in stored.items() if "layers.0.mlp.experts" in name
    }
    assert experts == {
        "gate_up_proj_blocks": (4, 256, 2, 16),
        "gate_up_proj_scales": (4, 256, 2),
        "gate_up_proj_bias": (4, 256),
        "down_proj_blocks": (4, 64, 4, 16),
        "down_proj_scales": (4, 64, 4),
        "down_proj_bias": (4, 64),
    }
