"""A chip that a package brings: its spec, its YAML file, and what is said when one of them is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distributions
from fl_dispatch import config, devices
from fl_dispatch.devices import detect
from fl_dispatch.errors import DeviceError
from fl_dispatch.settings import load_settings


@pytest.fixture(autouse=True)
def fresh() -> Any:
    caches = (detect._packages, devices.device_specs, devices.detect_device, devices.device_of)
    for found in caches:
        found.cache_clear()
    yield
    for found in caches:
        found.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    """Pretend that a package with this spec is installed; an exception is raised by its import."""
    module = ModuleType("nimbus_fl")
    module.__dict__["SPEC"] = spec
    monkeypatch.setitem(sys.modules, "nimbus_fl", module)
    point = EntryPoint("nimbus", "nimbus_fl:SPEC", devices.DEVICE_GROUP)
    monkeypatch.setattr(detect, "entry_points", lambda group: [point])


@pytest.fixture
def nimbus(tmp_path: Path) -> devices.DeviceSpec:
    (tmp_path / "nimbus.yaml").write_text("prefer: vendor\n")
    (tmp_path / "nimbus-x2.yaml").write_text("prefer: reference\n")
    return replace(
        devices.CPU, name="nimbus", vendor="nimbus", priority=150, platform_config=tmp_path / "nimbus.yaml", verified={}
    )


def test_the_file_beside_the_spec_holds_the_defaults(monkeypatch: Any, nimbus: devices.DeviceSpec) -> None:
    install(monkeypatch, nimbus)
    settings = load_settings({})
    assert (settings.policy.prefer, str(settings.origin("prefer"))) == ("vendor", "nimbus.yaml (platform), line 1")


def test_a_file_for_one_chip_lies_beside_it(monkeypatch: Any, nimbus: devices.DeviceSpec) -> None:
    install(monkeypatch, replace(nimbus, device_name=lambda index: "Nimbus X2"))
    assert load_settings({}).policy.prefer == "reference"


def test_the_variable_knows_a_packages_platform_on_any_machine(monkeypatch: Any, nimbus: devices.DeviceSpec) -> None:
    install(monkeypatch, replace(nimbus, detect=lambda: False))
    assert devices.detect_device() is devices.CPU
    assert load_settings({"VLLM_FL_PLATFORM": "nimbus"}).policy.prefer == "vendor"
    assert config.load_platform_config("nimbus") == {"prefer": "vendor"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"platform_config": Path("/nowhere/nimbus.yaml")},
            "platform_config names /nowhere/nimbus.yaml, which does not",
        ),
        ({"torch_type": "nimbus"}, "PyTorch knows no device type 'nimbus'; name the package that brings it"),
        ({"torch_type": "npu", "extension": "torch_npu"}, "is the package that brings it ('torch_npu') installed?"),
    ],
)
def test_a_spec_that_cannot_be_used_is_one_error(
    monkeypatch: Any, nimbus: devices.DeviceSpec, changes: dict[str, Any], problem: str
) -> None:
    install(monkeypatch, replace(nimbus, **changes))
    with pytest.raises(DeviceError) as caught:
        devices.detect_device()
    assert str(caught.value).startswith("device 'nimbus': ")
    assert problem in str(caught.value)


def test_a_name_without_a_file_is_an_error_too(monkeypatch: Any, nimbus: devices.DeviceSpec) -> None:
    install(monkeypatch, replace(nimbus, platform_config="nimbus"))
    with pytest.raises(DeviceError, match="platform_config names 'nimbus', but there is only amd, ascend"):
        load_settings({})


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("graphs", "yes", "True or False"),
        ("memory", 4, "a function"),
        ("model_runners", ["v1"], "a tuple of strings"),
        ("verified", "vLLM", "a mapping from hosts to strings"),
        ("platform_config", 7, "a name or a pathlib.Path, or None"),
        ("dtypes", ("float32",), "a tuple of PyTorch dtypes"),
        ("inductor", "rust", "'cpp', 'triton' or None"),
        ("name", "", "a string"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(field: str, value: Any, needed: str) -> None:
    with pytest.raises(DeviceError, match=f"{field} must be {needed}, not"):
        replace(devices.CPU, **{field: value})


def test_a_wrong_field_is_no_reason_to_take_another_device(monkeypatch: Any) -> None:
    install(monkeypatch, lambda: replace(devices.CPU, name="nimbus", graphs="yes"))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"graphs must be .*entry point 'nimbus': nimbus_fl:SPEC"):
        devices.detect_device()


PACKAGE = """
from dataclasses import replace
from fl_dispatch.devices import CPU
SPEC = replace(CPU, name="nimbus", priority=150, {changes})
"""


def command(tmp_path: Path, changes: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command ``fl`` where a package with this spec is installed."""
    (tmp_path / "nimbus_fl.py").write_text(PACKAGE.format(changes=changes))
    distributions.install(tmp_path, "nimbus-fl", "[vllm_fl.device]\nnimbus = nimbus_fl:SPEC\n", "1.0")
    return subprocess.run(
        [sys.executable, "-c", "from fl_dispatch.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("changes", ['torch_type="nimbus"', "graphs=3", 'platform_config="missing"'])
def test_doctor_and_verify_say_it_in_one_sentence(tmp_path: Path, changes: str) -> None:
    said = command(tmp_path, changes, "doctor"), command(tmp_path, changes, "verify", "--op", "rms_norm")
    for finished, code in zip(said, (1, 2), strict=True):
        output = finished.stdout + finished.stderr
        assert finished.returncode == code, output
        assert "device 'nimbus': " in output
        assert "Traceback" not in output


def test_doctor_calls_a_package_that_does_not_load_a_problem(tmp_path: Path) -> None:
    finished = command(tmp_path, "no_such_field=1", "doctor")
    assert finished.returncode == 1
    assert "entry point 'nimbus' (nimbus_fl:SPEC) did not load: TypeError" in " ".join(finished.stderr.split())
    assert "Traceback" not in finished.stderr


def test_the_page_names_every_field_of_a_spec_once() -> None:
    page = (Path(__file__).parents[3] / "docs/guide/chips.md").read_text(encoding="utf-8")
    table = page.partition("| field | a host needs it for |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(field.name for field in fields(devices.DeviceSpec))
