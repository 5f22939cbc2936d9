"""Facts about devices, and the one that a machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_dispatch import devices as device
from fl_dispatch.devices import cpu, detect
from fl_dispatch.knowledge import error_kinds


def forget() -> None:
    for found in (detect._packages, device.device_specs, device.detect_device, device.device_of):
        found.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def install(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    """Pretend that packages with these entry points are installed."""
    points = [EntryPoint(name, value, device.DEVICE_GROUP) for name, value in targets.items()]
    monkeypatch.setattr(detect, "entry_points", lambda group: points if group == device.DEVICE_GROUP else [])


DRAGON = replace(device.CPU, name="dragon", vendor="dragon", priority=100)


def dragon() -> device.DeviceSpec:
    return DRAGON


def broken() -> device.DeviceSpec:
    raise OSError("no driver")


def test_without_an_accelerator_it_is_the_cpu() -> None:
    if not torch.cuda.is_available():
        assert device.detect_device() is device.CPU


def test_packages_come_first_and_what_looks_like_cuda_before_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, dragon=f"{__name__}:DRAGON")
    names = [spec.name for spec in device.device_specs()]
    assert names[0] == "dragon"
    assert names[-2:] == ["cuda", "cpu"]
    assert all(names.index(spec.name) < names.index("cuda") for spec in device.OTHERS)


@pytest.mark.parametrize("target", ["DRAGON", "dragon"])
def test_an_entry_point_names_a_spec_or_a_function(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    install(monkeypatch, dragon=f"{__name__}:{target}")
    assert device.detect_device() is DRAGON


@pytest.mark.parametrize("target", ["broken", "nothing_here", "Iterator"])
def test_one_that_does_not_load_is_reported_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, bad=f"{__name__}:{target}")
    assert device.detect_device().name != "bad"
    assert "'bad'" in caplog.text


def test_a_detection_that_raises_is_no_detection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detect, "device_specs", lambda: (replace(DRAGON, detect=broken), device.CPU))
    assert device.detect_device() is device.CPU
    assert "dragon" in caplog.text


@pytest.mark.parametrize(
    ("module", "captures"),
    [
        (SimpleNamespace(is_current_stream_capturing=lambda: True), True),
        (SimpleNamespace(is_current_stream_capturing=lambda: True, is_initialized=lambda: True), True),
        (SimpleNamespace(is_current_stream_capturing=lambda: True, is_initialized=lambda: False), False),
        (SimpleNamespace(is_current_stream_capturing=lambda: False), False),
        (SimpleNamespace(), False),
        (None, False),
    ],
)
def test_a_capture_is_what_the_devices_module_says(
    module: Any, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "npu", module, raising=False)
    assert device.ASCEND.captures() is captures
    assert replace(device.CPU, torch_type="npu").captures() is captures
    assert not device.CPU.captures()


def test_a_capture_is_what_a_devices_own_hook_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_current_stream_capturing=lambda: False), raising=False)
    monkeypatch.setattr(detect, "device_specs", lambda: (replace(DRAGON, is_capturing=lambda: True),))
    assert device.detect_device().captures()
    assert error_kinds.is_capturing()


def test_a_device_that_cannot_say_whether_it_captures_counts_as_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise OSError("driver")

    monkeypatch.setattr(detect, "device_specs", lambda: (replace(DRAGON, is_capturing=broken),))
    assert error_kinds.is_capturing()


def test_detection_creates_no_context() -> None:
    assert [spec.detect() for spec in device.BUILTIN_DEVICES][-1] is True
    assert not torch.cuda.is_initialized()


def test_the_cpu_knows_its_memory_and_its_name() -> None:
    available, total = device.CPU.memory(0)
    assert 0 < available <= total
    assert device.CPU.device_name(0)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    assert cpu.cpu_memory() == (600000, 1000000)
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu.cpu_memory()[1] > 1000000
