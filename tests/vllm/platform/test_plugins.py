"""Whatever VLLM_PLUGINS lets through, the platform brings its layers, and layers are not ours without the platform."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import HERE, Finished, Runs, background, python, start

import distributions
from fl_dispatch.devices import CPU
from fl_dispatch.hosting.start import startup as hosting
from vllm_fl.compat import detection
from vllm_fl.platform import startup

ENTRY_POINTS = """
[vllm.platform_plugins]
only_platform = vllm_fl:register_platform

[vllm.general_plugins]
only_ops = vllm_fl:register_ops
"""
OURS_REGISTERED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.custom_op import op_registry_oot
print("registered:", sorted(op_registry_oot))
from vllm.config import DeviceConfig
try:
    print("device:", DeviceConfig().device_type)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="session")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second distribution that names our two entry points apart, as a PYTHONPATH."""
    folder = distributions.install(tmp_path_factory.mktemp("distribution"), "fl-apart", ENTRY_POINTS)
    plugins = HERE / "plugins"
    return os.pathsep.join(filter(None, (str(folder), str(plugins), os.environ.get("PYTHONPATH", ""))))


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path], distribution: str) -> Mapping[str, Any]:
    model = checkpoint("qwen3")
    alone = {"VLLM_PLUGINS": "only_platform", "PYTHONPATH": distribution}
    variables = {"VLLM_FL_PREFER": "reference", "VLLM_FL_STRICT": "1", "VLLM_FL_LOG_LEVEL": "INFO"}
    runs = {
        "platform": start(model, variables={**alone, **variables}),
        "some": start(model, variables={"VLLM_FL_OOT_WHITELIST": "silu_and_mul,RotaryEmbedding"}),
        "ops": background("-c", OURS_REGISTERED, VLLM_PLUGINS="only_ops", PYTHONPATH=distribution),
        "none": background("-c", OURS_REGISTERED, VLLM_PLUGINS="", PYTHONPATH=distribution),
    }
    return Runs(runs)


def test_with_only_the_platform_listed_our_layers_run(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    report = results["platform"]["report"]
    assert set(report["layers"]) == {"RMSNorm", "SiluAndMul", "RotaryEmbedding"}
    assert report["native_layers"] == {}
    assert report["counts"]["rms_norm reference.torch"] > 0
    assert results["platform"]["steps"][0]["tokens"] == expected("qwen3")


def test_our_variables_raise_no_warning(results: Mapping[str, Any]) -> None:
    assert "Unknown vLLM environment variable" not in results["platform"]["log"]


@pytest.mark.parametrize("listed", ["ops", "none"])
def test_without_the_platform_no_layer_of_ours_is_registered(listed: str, results: Mapping[str, Any]) -> None:
    finished: Finished = results[listed]
    assert finished.returncode == 0, finished.log
    assert "registered: []" in finished.log


def test_without_any_platform_the_host_says_that_it_found_no_device(results: Mapping[str, Any]) -> None:
    assert "Failed to infer device type" in results["none"].log


def test_a_list_names_layers_by_operator_or_by_class(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    report = results["some"]["report"]
    assert set(report["layers"]) == {"SiluAndMul", "RotaryEmbedding"}
    assert set(report["native_layers"]) == {"RMSNorm"}
    assert "left to vLLM's own code: RMSNorm" in results["some"]["log"]
    assert results["some"]["steps"][0]["tokens"] == expected("qwen3")


def test_a_list_that_leaves_no_layer_stops_the_start(checkpoint: Callable[[str], Path]) -> None:
    run = start(checkpoint("qwen3"), variables={"VLLM_FL_OOT_WHITELIST": "gelu_and_mul"})
    with pytest.raises(AssertionError, match="no layer of this model runs through fl_dispatch"):
        run.result()


def test_it_says_whether_it_is_active_and_why() -> None:
    ended = python("-c", "import vllm_fl; vllm_fl.register_platform(); vllm_fl.register_platform()")
    assert ended.log.count("vllm_fl is active: device 'cpu'") == 1


def test_where_it_steps_aside_it_says_so_and_its_variables_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import envs

    left = replace(CPU, name="nimbus", left_to_host={"vLLM": "it has no graphs, so vLLM's own platform runs"})
    monkeypatch.setattr(hosting, "detect_device", lambda: left)
    monkeypatch.setattr(envs, "environment_variables", {})
    startup.detect.cache_clear()
    try:
        assert startup.detect() is None
        said = "vllm_fl is not active: device 'nimbus' is not served: it has no graphs, so vLLM's own platform runs"
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [said]
        assert "VLLM_FL_PREFER" in envs.environment_variables
    finally:
        startup.detect.cache_clear()


def test_switched_off_it_leaves_a_machine_to_vllm_that_vllm_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch import SelectionPolicy
    from fl_dispatch.settings import get_settings

    off = replace(get_settings(), policy=SelectionPolicy(enabled=False))
    for in_tree, active in (("cpu", False), (None, True)):
        monkeypatch.setattr(detection, "in_tree_platform", lambda found=in_tree: found)
        assert startup._judge(off)[0] is active
