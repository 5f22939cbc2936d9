"""The machine's device decides which of several files with one name holds the defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fl_dispatch import devices
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.settings import load_settings, platforms


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
