"""ATen replacement in real engines: after the weights, before anything is fixed, and nothing new once they serve.

The device is the CPU and FlagGems a stand-in of which some kernels are wrong; what is registered with PyTorch is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import STEP, Runs, start

PRODUCTS = {"VLLM_FL_PER_OP": "linear=reference;paged_attention=reference"}
"""Products with prepared weights, and attention in C++, do not go through PyTorch's own."""
VARIABLES = {"VLLM_FL_PLUGIN_MODULES": "aten_plugin", **PRODUCTS}
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}},
}


@pytest.fixture(scope="session")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for each engine's list of replaced operators."""
    return tmp_path_factory.mktemp("aten")


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path], lists: Path) -> Mapping[str, Any]:
    runs = {}
    for name, engine in ENGINES.items():
        variables = {**VARIABLES, "FLAGGEMS_ENABLE_OPLIST_PATH": str(lists / name)}
        runs[name] = start(checkpoint("qwen3"), STEP, STEP, engine=engine, variables=variables)
    return Runs(runs)


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_right_although_kernels_are_wrong(
    name: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    tokens = expected("qwen3")
    assert [step["tokens"] for step in results[name]["steps"]] == [tokens, tokens]
    aten = results[name]["report"]["aten"]["FlagGems"]
    assert aten["why_not"] == ""
    assert aten["calls"]["mm"] > 0
    assert aten["native"]["mm"] > 0  # batches of sizes that the start had not met
    assert aten["sealed"]
    assert "mul_.Tensor" in aten["wrong"] or "_softmax" in aten["wrong"]
    assert not set(aten["wrong"]) & set(aten["replaced"])


@pytest.mark.parametrize("name", ENGINES)
def test_the_list_and_the_manifest_name_what_is_replaced(name: str, results: Mapping[str, Any], lists: Path) -> None:
    report = results[name]["report"]
    replaced = [f"aten::{key}" for key in report["aten"]["FlagGems"]["replaced"]]
    assert (lists / name).read_text().split() == replaced
    if report["manifest"] is not None:
        assert report["manifest"]["aten"]["aten::mm"] == "flaggems_standin.mm"
        assert set(replaced) <= report["manifest"]["aten"].keys()
    assert (report["manifest"] is not None) == (name == "compiled")


def test_what_is_wrong_on_one_rank_is_replaced_on_none_and_the_engine_serves(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    engine = {**ENGINES["compiled"], "tensor_parallel_size": 2}
    uneven = {"VLLM_FL_PLUGIN_MODULES": "aten_uneven_plugin", **PRODUCTS}
    result = start(checkpoint("qwen3"), engine=engine, variables=uneven).result()
    assert result["steps"][0]["tokens"] == expected("qwen3")
    first, second = (report["aten"]["FlagGems"] for report in result["reports"])
    assert first["wrong"]["mm"].startswith("on rank 1: wrong: ")
    assert second["wrong"]["mm"].startswith("wrong: ")
    assert "mm.out" in first["replaced"]
    assert first["replaced"] == second["replaced"]
    manifests = [report["manifest"] for report in result["reports"]]
    assert manifests[0]["hash"] == manifests[1]["hash"]
    assert "aten::mm" not in manifests[0]["aten"]
