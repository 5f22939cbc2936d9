"""A selection made by variable, file or in code is in force in the scheduler's process, for single layers too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import start

from running import ran

FILE = "prefer: vendor\nop_backends:\n  silu_and_mul: [impl:vendor.probe]\n"
RULE = "  rms_norm@model.layers.1.*: [impl:reference.narrow]\n"
NAMES = ["sglang_variables", "sglang_file", "vllm_file", "code"]


@pytest.fixture(scope="module")
def result(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """The report of one engine for each way to select."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "one.yaml").write_text(FILE + RULE)
    (folder / "two.yaml").write_text(FILE)
    ways: dict[str, dict[str, Any]] = {
        "sglang_variables": {
            "variables": {
                "SGLANG_FL_PLUGIN_MODULES": "probe_plugin",
                "SGLANG_FL_PER_OP": "silu_and_mul=impl:vendor.probe|reference",
                "VLLM_FL_PER_OP": "silu_and_mul=reference",
                "VLLM_FL_PREFER": "reference",
                "SGLANG_FL_OOT_BLACKLIST": "RotaryEmbedding",
            }
        },
        "sglang_file": {
            "variables": {
                "SGLANG_FL_CONFIG": str(folder / "one.yaml"),
                "VLLM_FL_CONFIG": "/nowhere/fl.yaml",
                "VLLM_FL_PLUGIN_MODULES": "probe_plugin,narrow_norm",
                "SGLANG_FL_OOT_WHITELIST": "rms_norm,SiluAndMul",
            }
        },
        "vllm_file": {
            "variables": {"VLLM_FL_CONFIG": str(folder / "two.yaml"), "VLLM_FL_PLUGIN_MODULES": "probe_plugin"}
        },
        "code": {
            "variables": {"SGLANG_FL_PLUGIN_MODULES": "probe_plugin"},
            "policy_before": {"per_op_order": {"silu_and_mul": ["impl:vendor.probe"]}, "deny_vendors": ["nobody"]},
            "cold": True,  # only a direct child of this process may take its policy over
        },
        "off": {"variables": {"SGLANG_FL_PREFER_ENABLED": "false", "VLLM_FL_PLATFORM": "cuda"}},
    }
    runs = {name: start(checkpoint("qwen3"), **options) for name, options in ways.items()}
    return lambda way: runs[way].result()


def _policy(found: dict[str, Any]) -> dict[str, Any]:
    policy: dict[str, Any] = json.loads(found["report"]["settings"])["policy"]
    return policy


@pytest.mark.parametrize("way", NAMES)
def test_the_selected_implementation_runs_in_the_scheduler_process(
    way: str, result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result(way)["report"]["pid"] != result(way)["pid"]
    assert ran(result(way), "silu_and_mul") == {"vendor.probe"}
    assert result(way)["steps"][0]["tokens"] == expected("qwen3")


@pytest.mark.parametrize(
    ("way", "field", "origin"),
    [
        ("sglang_variables", "per_op_order", "environment variable SGLANG_FL_PER_OP"),
        ("sglang_variables", "prefer", "environment variable VLLM_FL_PREFER"),
        ("sglang_file", "per_op_order", "one.yaml, line 2"),
        ("sglang_file", "prefer", "one.yaml, line 1"),
        ("vllm_file", "per_op_order", "two.yaml, line 2"),
        ("vllm_file", "prefer", "two.yaml, line 1"),
        ("off", "prefer", "cuda.yaml (platform)"),
    ],
)
def test_the_scheduler_knows_where_each_value_came_from(
    way: str, field: str, origin: str, result: Callable[[str], dict[str, Any]]
) -> None:
    assert origin in json.dumps(_policy(result(way))["origins"][field])


def test_a_policy_set_in_code_before_the_engine_reaches_the_scheduler(result: Callable[[str], dict[str, Any]]) -> None:
    policy = _policy(result("code"))
    assert policy["per_op_order"] == [["silu_and_mul", ["impl:vendor.probe"]]]
    assert policy["deny_vendors"] == ["nobody"]


def test_a_rule_for_some_layers_holds_for_these_only(result: Callable[[str], dict[str, Any]]) -> None:
    calls = result("sglang_file")["report"]["counts"]
    narrow, reference = calls["rms_norm reference.narrow"], calls["rms_norm reference.torch"]
    # In each of three layers four norms, two of them in attention; one at the end.
    steps, rest = divmod(narrow, 4)
    assert rest == 0
    assert steps > 0
    assert reference == (4 + 4 + 1) * steps


def test_a_layer_on_the_blacklist_runs_sglangs_own_code(result: Callable[[str], dict[str, Any]]) -> None:
    report = result("sglang_variables")["report"]
    assert set(report["layers"]) == {"RMSNorm", "SiluAndMul"}
    assert set(report["native_layers"]) == {"RotaryEmbedding"}
    assert ran(result("sglang_variables"), "rotary_embedding") == set()
    assert report["undispatched"] == {}


def test_a_layer_that_is_not_on_the_whitelist_runs_sglangs_own_code(result: Callable[[str], dict[str, Any]]) -> None:
    report = result("sglang_file")["report"]
    assert set(report["layers"]) == {"RMSNorm", "SiluAndMul"}
    assert set(report["native_layers"]) == {"RotaryEmbedding"}
    assert ran(result("sglang_file"), "rotary_embedding") == set()


def test_switched_off_it_leaves_the_layers_to_sglang_and_runs_references(
    result: Callable[[str], dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    report = result("off")["report"]
    assert report["layers"] == {}
    assert set(report["native_layers"]) == {"RMSNorm", "SiluAndMul", "RotaryEmbedding"}
    assert {key.split(" ")[1] for key in report["counts"]} == {"reference.torch"}
    assert result("off")["steps"][0]["tokens"] == expected("qwen3")
