"""Platforms: which have a YAML file with their defaults, and which one this machine is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from fl_dispatch import devices
from fl_dispatch.errors import DeviceError

CONFIG_DIR = Path(__file__).parents[1] / "config"


def user_dir() -> Path:
    """The folder of the user's own platform files, which count before those that are shipped."""
    return platformdirs.user_config_path("fl_dispatch") / "platforms"


def tuned_path(device: devices.DeviceSpec) -> Path:
    """The user's own file for this machine's chip: the platform's name, then the words of the chip's.

    Raises:
        DeviceError: the device names no platform.
    """
    if device.platform_config is None:
        raise DeviceError(device.name, "it has no platform_config, so its platform has no name; --out names a file")
    name = "-".join((Path(device.platform_config).stem, *_words(device.device_name(0))))
    return user_dir() / f"{name}.yaml"


def is_own(file: Path) -> bool:
    """Whether a platform's file is the user's own."""
    return file.parent == user_dir()


def identity(file: Path) -> str:
    """A platform's file by its path and a short hash of its content, which differs where the content does."""
    return f"{file} ({hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"


def evidence_path(file: Path) -> Path:
    """The file beside a platform's file that holds what it was made from."""
    return file.with_name(f"{file.stem}.evidence.json")


def shipped_path(device: devices.DeviceSpec) -> Path | None:
    """The shipped file for a device, none of the user's own."""
    if device.platform_config is None:
        return None
    files = _shipped_files()
    name = _best(files, device)
    return None if name is None else files[name]


def _words(name: str) -> list[str]:
    """The words of a chip's name: of ``NVIDIA H100 80GB HBM3`` these are nvidia, h100, 80gb, hbm3."""
    return re.findall(r"[a-z0-9.]+", name.lower())


def _shipped_files() -> dict[str, Path]:
    """Platform → its file: this package's files, and those that other packages ship with their device's spec.

    Precedence among files of one name: the detected device's file, this package's, then files of absent devices.
    """
    files = {path.stem: path for path in CONFIG_DIR.glob("*.yaml")}
    others = [path for device in devices.device_specs() for path in _shipped(device)]
    own = _shipped(devices.detect_device())
    return {path.stem: path for path in others} | files | {path.stem: path for path in own}


def _shipped(device: devices.DeviceSpec) -> list[Path]:
    """The file beside a device's spec, and those for single chips, as :func:`detect_platform` says."""
    shipped = device.platform_config
    return [shipped, *shipped.parent.glob(f"{shipped.stem}-*.yaml")] if isinstance(shipped, Path) else []


def _own_files() -> dict[str, Path]:
    """Platform → the user's own file."""
    return {path.stem: path for path in user_dir().glob("*.yaml")}


def _best(files: Mapping[str, Path], device: devices.DeviceSpec) -> str | None:
    """The platform among these that fits a device best: the one that names most words of its chip."""
    base = Path(device.platform_config or "").stem
    chips = [name for name in files if name.startswith(f"{base}-")]
    if chips:  # only then the device is asked for its name
        words = set(_words(device.device_name(0)))
        named = {name: _words(name.removeprefix(f"{base}-")) for name in chips}
        fitting = [name for name in chips if named[name] and words.issuperset(named[name])]
        if fitting:
            return max(sorted(fitting), key=lambda name: len(named[name]))
    return base if base in files else None


def list_platforms() -> tuple[str, ...]:
    """The platforms that have a file."""
    return tuple(sorted({*_shipped_files(), *_own_files()}))


def get_config_path(platform: str) -> Path | None:
    """A platform's file, the user's own before a shipped one, or ``None`` if it has none."""
    return _own_files().get(platform) or _shipped_files().get(platform)


def detect_platform() -> str | None:
    """The platform of this machine's device, or ``None`` if the device names none.

    A file for one chip is named after the platform and words of the chip's name: ``cuda-h200.yaml`` is for an
    ``NVIDIA H200``. A file of the user's own counts before those that are shipped, then the one with most words.

    Raises:
        DeviceError: the device names a file that does not exist.
    """
    device = devices.detect_device()
    if device.platform_config is None:
        return None
    shipped = _shipped_files()
    base = Path(device.platform_config).stem
    if base not in shipped:
        there = ", ".join(sorted(shipped))
        raise DeviceError(device.name, f"platform_config names '{base}', but there is only {there}")
    return _best(_own_files(), device) or _best(shipped, device)
