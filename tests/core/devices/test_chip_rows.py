"""The rows of chips that nobody had: what is asked at detection, with stand-ins, and who is taken for whom."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_dispatch import config, devices
from fl_dispatch.devices import cuda, detect, nvml, others

LIKE_CUDA = {  # name → torch.version.cuda and .hip of the vendor's build, a file of its driver, a program of its own
    "metax": ("11.6", None, "dev/mxcd", "mx-smi"),
    "iluvatar": ("10.2", None, "dev/iluvatar0", "ixsmi"),
    "kunlunxin": ("11.8", None, "dev/xpu0", "xpu_smi"),
    "thead": ("12.3", None, "dev/alixpu_ppu0", "ppu-smi"),
    "hygon": (None, "5.7", "opt/dtk-25.04", "hy-smi"),
    "amd": (None, "6.4", None, None),
    "cuda": ("13.0", None, "dev/nvidia0", None),
}
OF_ITS_OWN = {spec.name: spec for spec in (*devices.OTHERS, devices.ASCEND) if spec.torch_type != "cuda"}


@pytest.fixture(autouse=True)
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever needs a context fails."""

    def refuse(*_: Any) -> None:
        raise AssertionError("detection created a context")

    for name in ("init", "_lazy_init", "get_device_properties", "get_device_name", "mem_get_info", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine without any device, of which a test says what it has."""
    monkeypatch.setattr(others, "ROOT", tmp_path)
    monkeypatch.setattr(cuda, "ROOT", tmp_path)
    monkeypatch.setattr(cuda.nvml, "sees_nvidia", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def has(versions: tuple[str | None, str | None], file: str | None = None, tool: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", versions[0])
        monkeypatch.setattr(torch.version, "hip", versions[1])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        for path in (file, tool and f"bin/{tool}"):
            if path:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).touch(mode=0o755)

    return has


def detected() -> list[str]:
    return [spec.name for spec in devices.BUILTIN_DEVICES if spec.detect()]


@pytest.mark.parametrize("name", LIKE_CUDA)
def test_a_chip_that_pytorch_calls_cuda_is_known_by_its_driver(machine: Any, name: str) -> None:
    build, hip, file, _ = LIKE_CUDA[name]
    machine((build, hip), file)
    assert detected() == [name, "cpu"]


@pytest.mark.parametrize("name", [name for name, row in LIKE_CUDA.items() if row[3]])
def test_or_by_its_management_program(machine: Any, name: str) -> None:
    build, hip, _, tool = LIKE_CUDA[name]
    machine((build, hip), None, tool)
    assert detected() == [name, "cpu"]


def test_a_chip_that_only_says_a_version_of_cuda_is_not_nvidias(machine: Any) -> None:
    machine(("12.1", None))
    assert detected() == ["cpu"]


def test_an_accelerator_that_nobody_knows_is_not_left_alone_in_silence(machine: Any, caplog: Any) -> None:
    machine(("12.1", None))
    assert detect.detect_device.__wrapped__() is devices.CPU
    assert "PyTorch sees 2 devices of type 'cuda', but no known chip's driver" in caplog.text


def test_nvidias_management_library_is_a_sign_too(machine: Any, monkeypatch: Any) -> None:
    machine(("13.0", None))
    monkeypatch.setattr(cuda.nvml, "sees_nvidia", lambda: True)
    assert detected() == ["cuda", "cpu"]


@pytest.mark.parametrize(("left", "tool"), [("opt/maca", "mx-smi"), ("usr/local/corex", "ixsmi"), (None, "ppu-smi")])
def test_a_toolkit_left_on_a_machine_with_nvidias_driver_is_no_chip(machine: Any, left: str | None, tool: str) -> None:
    machine(("12.8", None), "dev/nvidiactl")
    machine(("12.8", None), left, tool)
    first, *_ = (spec for spec in devices.device_specs() if spec.detect())
    assert first.name == "cuda"


@pytest.mark.parametrize("name", ["metax", "iluvatar", "kunlunxin", "thead"])
def test_another_vendors_chip_beside_nvidias_files_is_still_the_other_vendors(machine: Any, name: str) -> None:
    build, hip, file, _ = LIKE_CUDA[name]
    machine((build, hip), "dev/nvidiactl")
    machine((build, hip), file)
    first, *_ = (spec for spec in devices.device_specs() if spec.detect())
    assert first.name == name


@pytest.mark.parametrize("spec", OF_ITS_OWN.values(), ids=OF_ITS_OWN)
def test_a_type_of_its_own_is_there_if_pytorch_counts_one(machine: Any, monkeypatch: Any, spec: Any) -> None:
    for found, there in ((SimpleNamespace(device_count=lambda: 2), True), (SimpleNamespace(device_count=int), False)):
        monkeypatch.setattr(torch, spec.torch_type, found, raising=False)
        assert (spec.detect(), spec.device_count() > 0) == (there, there)


@pytest.mark.parametrize("spec", OF_ITS_OWN.values(), ids=OF_ITS_OWN)
def test_the_package_that_brings_the_type_is_imported_if_it_is_there(
    monkeypatch: Any, tmp_path: Path, spec: Any
) -> None:
    if spec.extension is None:
        pytest.skip("PyTorch has the type itself")
    (tmp_path / f"{spec.extension}.py").write_text(
        f"import torch, types; torch.{spec.torch_type} = types.SimpleNamespace(device_count=lambda: 1)"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch, spec.torch_type, None, raising=False)
    monkeypatch.delattr(torch, spec.torch_type)
    assert spec.detect()


@pytest.mark.parametrize("spec", devices.OTHERS, ids=lambda spec: spec.name)
def test_every_row_has_a_file_and_says_that_nobody_verified_it(spec: devices.DeviceSpec) -> None:
    assert config.load_platform_config(str(spec.platform_config)) == {"prefer": "flagos"}
    assert all(spec.unverified(host) for host in ("vLLM", "SGLang"))
    assert not spec.forks


LIBRARY = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = 0; return 0; }
#ifdef VENDOR
int nvmlDeviceGetPciInfo_v3(void *device, unsigned *pci) { memset(pci, 0, 68); pci[7] = VENDOR; return 0; }
#endif
"""


@pytest.mark.parametrize(("vendor", "nvidias"), [("0x233010de", True), ("0x00019999", False), (None, False)])
def test_a_library_that_calls_itself_nvml_counts_if_its_device_is_nvidias(
    vendor: str | None, nvidias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvml.c").write_text(LIBRARY)
    define = [f"-DVENDOR={vendor}"] if vendor else []
    built = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", *define, "-o", str(built), str(tmp_path / "nvml.c")], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(built) if name == built.name else name))
    nvml._library.cache_clear()
    assert nvml.sees_nvidia() is nvidias
    nvml._library.cache_clear()
