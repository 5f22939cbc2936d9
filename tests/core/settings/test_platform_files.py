"""The machine's device decides which of several files with one name holds the defaults."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_dispatch import devices
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.settings import load_config_file, load_settings, platforms, tuned


@pytest.fixture
def stranger(tmp_path: Path) -> DeviceSpec:
    """A device of an installed package that calls its file as this package calls the CPU's."""
    path = tmp_path / "cpu.yaml"
    path.write_text("prefer: reference\n")
    return replace(devices.CPU, name="nimbus", vendor="nimbus", priority=150, platform_config=path, verified={})


@pytest.mark.parametrize(("here", "prefer"), [(False, "flagos"), (True, "reference")])
def test_a_packages_file_holds_no_defaults_where_its_device_is_missing(
    monkeypatch: pytest.MonkeyPatch, stranger: DeviceSpec, here: bool, prefer: str
) -> None:
    monkeypatch.setattr(devices, "device_specs", lambda: (stranger, devices.CPU))
    monkeypatch.setattr(devices, "detect_device", lambda: stranger if here else devices.CPU)
    assert load_settings({}).policy.prefer == prefer
    assert (platforms.get_config_path("cpu") == stranger.platform_config) is here


# -- a user's own files, which are tuned


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the user's own files, on a machine with an H100 of which NVIDIA makes several kinds."""
    spec = replace(devices.CUDA, device_name=lambda index: "NVIDIA H100 80GB HBM3", driver=lambda: "580.1")
    monkeypatch.setattr(devices, "detect_device", lambda: spec)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "fl_dispatch" / "platforms"
    folder.mkdir(parents=True)
    return folder


OWN = {"rms_norm": ("impl:vendor.cuda",), "linear": ("reference",)}
"""Operator → the order that a user's file has for it, which the shipped file does not have."""


def tune_file(folder: Path, name: str, **evidence: object) -> Path:
    file = folder / f"{name}.yaml"
    rules = {name: [{"order": [*order]}] for name, order in OWN.items()}
    file.write_text(yaml.safe_dump({"op_tuned": rules}, sort_keys=False))
    if evidence:
        facts = {"machine": {"device": "NVIDIA H100 80GB HBM3"}, "driver": "580.1", "providers": {}}
        platforms.evidence_path(file).write_text(json.dumps({**facts, **evidence}))
    return file


def test_the_users_file_counts_that_names_most_words_of_the_chip(own: Path) -> None:
    assert platforms.detect_platform() == "cuda-h100"
    assert platforms.get_config_path("cuda-h100") == platforms.CONFIG_DIR / "cuda-h100.yaml"
    for name in ("cuda", "cuda-h100", "cuda-nvidia-h100-80gb-hbm3", "cuda-nvidia-h100-pcie", "ascend"):
        tune_file(own, name)
        expected = name if name.startswith("cuda") and not name.endswith("pcie") else "cuda-nvidia-h100-80gb-hbm3"
        assert platforms.detect_platform() == expected
    assert platforms.get_config_path("cuda-h100") == own / "cuda-h100.yaml"
    assert platforms.tuned_path(devices.detect_device()) == own / "cuda-nvidia-h100-80gb-hbm3.yaml"
    assert platforms.shipped_path(devices.detect_device()) == platforms.CONFIG_DIR / "cuda-h100.yaml"


def test_a_users_file_is_named_in_the_log_in_origins_and_with_a_hash_of_its_content(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tune_file(own, "cuda-h100", providers={"rms_norm": {"pyyaml": metadata.version("pyyaml")}})
    with caplog.at_level(logging.INFO):
        found = load_settings({})
    assert f"defaults come from {file}" in caplog.text
    assert "tuned with something else" not in caplog.text
    assert str(found.origin("op_tuned.rms_norm")) == f"{file} (platform, your own), line 2"
    content = found.platform_file
    file.write_text("prefer: vendor\n")
    assert content is not None
    assert content.startswith(f"{file} (")
    assert load_settings({}).platform_file != content
    assert load_settings({"VLLM_FL_CONFIG": str(file)}).platform_file is None


@pytest.mark.parametrize(
    ("evidence", "stale", "why"),
    [
        ({"providers": {"rms_norm": {"pyyaml": "1.0"}, "linear": {}}}, {"rms_norm"}, "pyyaml 1.0, now "),
        ({"providers": {"rms_norm": {"no-such-package": "1.0"}}}, {"rms_norm"}, "no-such-package 1.0, now missing"),
        ({"driver": "570.2", "providers": {"rms_norm": {}}}, {"every operator"}, "the driver 570.2, now 580.1"),
        ({"providers": {"rms_norm": {"": "1.0"}}}, {"rms_norm"}, " 1.0, now missing"),
        (
            {"machine": {"device": "NVIDIA H100 PCIe"}, "providers": {"rms_norm": {}, "linear": {}}},
            {"every operator"},
            "the chip NVIDIA H100 PCIe, now NVIDIA H100 80GB HBM3",
        ),
        ({"providers": 5}, {"every operator"}, "cannot be read"),
    ],
)
def test_what_was_tuned_with_something_else_does_not_count_and_is_named_in_one_warning(
    own: Path, caplog: pytest.LogCaptureFixture, evidence: dict[str, Any], stale: set[str], why: str
) -> None:
    """The shipped file's rules count in its place."""
    file = tune_file(own, "cuda-h100", **evidence)
    shipped = load_config_file(platforms.CONFIG_DIR / "cuda-h100.yaml").policy
    found = load_settings({})
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert why in warning
    assert why in str(found.platform_file)  # so ranks of which one finds the file stale name the reason
    assert set(tuned.stale_entries(file)) == stale
    assert why in str(found.origin("op_tuned"))
    for name, order in OWN.items():
        rules = found.policy.get_tuned_rules(name)
        if name in stale or tuned.EVERY in stale:
            assert rules == shipped.get_tuned_rules(name)
            assert "cuda-h100.yaml (platform), line" in str(found.origin(f"op_tuned.{name}")) or not rules
        else:
            assert rules[0].order == order
            assert str(file) in str(found.origin(f"op_tuned.{name}"))
    if tuned.EVERY in stale:
        assert dict(found.policy.op_tuned) == dict(shipped.op_tuned)
    assert load_settings({"VLLM_FL_PLATFORM": "cuda-h100"}).policy.op_tuned == found.policy.op_tuned


def test_evidence_next_to_a_shipped_file_takes_no_rule_away(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No other rules could take their place."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    tune_file(shipped, "cuda-h100", driver="570.2")
    monkeypatch.setattr(platforms, "CONFIG_DIR", shipped)
    assert {name for name, _ in load_settings({"VLLM_FL_PLATFORM": "cuda-h100"}).policy.op_tuned} == {*OWN}


def test_a_chip_whose_driver_cannot_be_asked_has_none(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise OSError("no library")

    spec = replace(devices.detect_device(), driver=fail)
    monkeypatch.setattr(devices, "detect_device", lambda: spec)
    tune_file(own, "cuda-h100", driver="580.1")
    assert "the driver 580.1, now missing" in str(load_settings({}).origin("op_tuned"))


def test_names_in_a_warning_have_no_control_characters(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune_file(own, "cuda-h100", providers={"rms_norm\nERROR": {"pack\x1bage": "1.0"}})
    load_settings({})
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "rms_norm\\nERROR (pack\\x1bage 1.0" in warning
    assert warning.isprintable()


def test_a_rule_for_one_layer_is_stale_with_its_operator(own: Path) -> None:
    file = tune_file(own, "cuda-h100", providers={"rms_norm": {"pyyaml": "1.0"}, "linear": {}})
    rules = "\n".join(f"  {key}:\n    - order: [reference]" for key in ("rms_norm@a.*", "rms_norm", "linear@a.*"))
    file.write_text(f"op_tuned:\n{rules}\n")
    policy = load_settings({}).policy
    assert {key for key, _ in policy.op_tuned if str(file) in str(policy.origin(f"op_tuned.{key}"))} == {"linear@a.*"}


def test_kernels_of_ours_with_another_source_are_another_version(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = tmp_path / "backends"
    kernels.mkdir()
    monkeypatch.setattr(tuned, "BACKENDS", kernels)
    found = []
    for text in ("one", "another"):
        (kernels / "kernel.py").write_text(text)
        (kernels / f"._{text}.py").write_text("not a kernel")
        (kernels / ".#kernel.py").unlink(missing_ok=True)
        (kernels / ".#kernel.py").symlink_to("an editor's lock")
        tuned._kernels.cache_clear()
        if not found:
            file = tune_file(own, "cuda-h100", providers={"rms_norm": {tuned.OURS: tuned.installed(tuned.OURS)}})
        found.append(sorted(tuned.stale_entries(file)))
    tuned._kernels.cache_clear()
    assert found == [[], ["rms_norm"]]


# -- files of benchmarks


@pytest.mark.parametrize(
    ("name", "operator"), [("w4a16-by-rows", "weight_only_linear"), ("fp8-blocks-deep-gemm", "scaled_linear")]
)
def test_a_choice_is_that_of_the_h100_but_for_one_operator(name: str, operator: str) -> None:
    root = Path(__file__).resolve().parents[3]
    files = f"benchmarks/configs/{name}.yaml", "src/fl_dispatch/config/cuda-h100.yaml"
    other, shipped = (yaml.safe_load((root / file).read_text()) for file in files)
    assert other["op_tuned"].pop(operator) != shipped["op_tuned"].pop(operator)
    assert other == shipped
