"""``fl new-backend`` writes a package that is formatted, typed and right, and overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml

from fl_dispatch.api import SERVED
from fl_dispatch.cli import new_backend
from fl_dispatch.cli.new_backend import write_package
from fl_dispatch.devices import CPU, DeviceSpec
from fl_dispatch.errors import DispatchError

ROOT = Path(__file__).parents[3]
NAMES = ("acme", "very_long_name_of_a_vendor_2")
CASES = [(name, device) for name in NAMES for device in (None, "npu", "cuda")]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, side by side."""
    folder = tmp_path_factory.mktemp("packages")
    for name, device in CASES:
        write_package(name, folder / f"{name}-{device}", device)
    return folder


@pytest.mark.parametrize(("name", "device"), CASES)
def test_the_package_is_formatted_and_without_findings(name: str, device: str | None, packages: Path) -> None:
    folder = packages / f"{name}-{device}"
    for arguments in (("format", "--check"), ("check", "--select", "E,F,W,I,N,UP,B,SIM,RUF,PT,RET")):
        done = run(folder, "-m", "ruff", *arguments, ".")
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("device", [None, "npu"])
def test_the_package_passes_strict_typing(device: str | None, packages: Path) -> None:
    module = packages / f"acme-{device}" / "acme_fl"
    done = run(ROOT, "-m", "mypy", "--config-file", "", "--strict", "--ignore-missing-imports", str(module))
    assert "Success" in done.stdout, done.stdout


@pytest.mark.parametrize(("name", "device"), CASES)
def test_the_metadata_names_what_is_there(name: str, device: str | None, packages: Path) -> None:
    folder = packages / f"{name}-{device}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    api = project["entry-points"].pop("fl_dispatch.api")
    assert api == {name: f"fl_dispatch.api:V{SERVED.stop - 1}"}
    assert set(project["entry-points"]) == {"vllm_fl.plugin", *(["vllm_fl.device"] if device else [])}
    for points in project["entry-points"].values():
        ((point, target),) = points.items()
        module, _, found = target.partition(":")
        assert point == name
        assert f"{found}" in (folder / f"{module.replace('.', '/')}.py").read_text()
    steps = yaml.safe_load((folder / ".github/workflows/test.yml").read_text())["jobs"]["test"]["steps"]
    assert {"run": f"fl verify --impl vendor.{name}"} in steps


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_the_device_is_data_of_its_torch_type(device: str, packages: Path) -> None:
    module = spec_from_file_location("acme_device", packages / f"acme-{device}/acme_fl/device.py")
    assert module is not None
    assert module.loader is not None
    loaded = module_from_spec(module)
    module.loader.exec_module(loaded)
    spec = loaded.SPEC
    assert isinstance(spec, DeviceSpec)
    assert (spec.name, spec.vendor, spec.torch_type) == ("acme", "acme", device)
    assert spec.dispatch_key == {"npu": "PrivateUse1", "cuda": "CUDA"}[device]
    assert spec.dist_backend in torch.distributed.Backend.backend_list
    assert (spec.extension, spec.verified) == ({"npu": "torch_npu", "cuda": None}[device], {})
    assert spec.detect() is False
    assert yaml.safe_load(Path(spec.platform_config).read_text()) == {"prefer": "vendor"}


def test_a_cuda_like_chip_is_not_an_nvidia_one(packages: Path) -> None:
    assert 'Path("/dev/acme0").exists() and' in (packages / "acme-cuda/acme_fl/device.py").read_text()


@pytest.mark.parametrize("name", ["Acme", "a-b", "1a", "a__b", "", "class", "acme.x", "äh"])
def test_a_name_that_is_no_identifier_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match="cannot be a vendor's name"):
        write_package(name, tmp_path / "p")


@pytest.mark.parametrize("name", ["cpu", "cuda", "template"])
def test_a_built_in_vendors_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match=f"vendor '{name}' has a backend in fl-dispatch"):
        write_package(name, tmp_path / "p")


def test_a_device_that_is_known_is_not_declared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_backend, "device_specs", lambda: (replace(CPU, name="bolt", torch_type="xpu"),))
    with pytest.raises(DispatchError, match="has a device 'bolt'"):
        write_package("bolt", tmp_path / "p", "xpu")
    assert write_package("bolt", tmp_path / "p")  # kernels for it are welcome


def test_a_name_whose_module_is_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match="module 'vllm_fl' is installed"):
        write_package("vllm", tmp_path / "p")


@pytest.mark.parametrize("device", ["npuu", "npu:0", "", "meta", "NPU"])
def test_a_device_type_that_pytorch_does_not_know_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match="PyTorch knows no device type"):
        write_package("acme", tmp_path / "p", device)
    assert not (tmp_path / "p").exists()


def test_the_cpu_is_no_device_of_a_vendors(tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match="leave --device out"):
        write_package("acme", tmp_path / "p", "cpu")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "mine").write_text("kept")
    with pytest.raises(DispatchError, match="exists; name another folder"):
        write_package("acme", folder)
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_the_package_can_be_read_in_five_minutes(tmp_path: Path) -> None:
    lines = [len(path.read_text().splitlines()) for path in write_package("acme", tmp_path / "p", "npu")[1:]]
    assert max(lines) <= 120
    assert sum(lines) <= 350
