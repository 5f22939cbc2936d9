"""Platforms with a YAML file of defaults, and the platform of this machine."""

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
    """Return the folder of the user's own platform files, which take precedence over shipped ones."""
    return platformdirs.user_config_path("fl_dispatch") / "platforms"


def tuned_path(device: devices.DeviceSpec) -> Path:
    """Return the path of the user's file for this chip: the platform's name, then the words of the chip's name.

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


def identity(file: Path, remark: str = "") -> str:
    """Return a platform file's path, a remark, and in brackets at the end a short hash of content and remark."""
    content = hashlib.sha256(file.read_bytes() + remark.encode()).hexdigest()[:16]
    return f"{file}{remark and ', '}{remark} ({content})"


def evidence_path(file: Path) -> Path:
    """Return the file next to a platform's file that holds its evidence."""
    return file.with_name(f"{file.stem}.evidence.json")


def shipped_path(device: devices.DeviceSpec) -> Path | None:
    """Return the shipped file for a device, ignoring the user's own files."""
    if device.platform_config is None:
        return None
    files = _shipped_files()
    name = _best(files, device)
    return None if name is None else files[name]


def _words(name: str) -> list[str]:
    """Return the words of a chip's name: nvidia, h100, 80gb, hbm3 for ``NVIDIA H100 80GB HBM3``."""
    return re.findall(r"[a-z0-9.]+", name.lower())


def _shipped_files() -> dict[str, Path]:
    """Return platform → file: this package's files, and files that other packages ship with their device's spec.

    Precedence among files of one name: the detected device's file, this package's, then files of absent devices.
    """
    files = {path.stem: path for path in CONFIG_DIR.glob("*.yaml")}
    others = [path for device in devices.device_specs() for path in _shipped(device)]
    own = _shipped(devices.detect_device())
    return {path.stem: path for path in others} | files | {path.stem: path for path in own}


def _shipped(device: devices.DeviceSpec) -> list[Path]:
    """Return the file next to a device's spec, and files for single chips, see :func:`detect_platform`."""
    shipped = device.platform_config
    return [shipped, *shipped.parent.glob(f"{shipped.stem}-*.yaml")] if isinstance(shipped, Path) else []


def _own_files() -> dict[str, Path]:
    """Return platform → the user's own file."""
    return {path.stem: path for path in user_dir().glob("*.yaml")}


def _best(files: Mapping[str, Path], device: devices.DeviceSpec) -> str | None:
    """Return the platform among these that fits a device best: the one with most words of the chip's name."""
    base = Path(device.platform_config or "").stem
    chips = [name for name in files if name.startswith(f"{base}-")]
    if chips:  # only this case reads the device's name
        words = set(_words(device.device_name(0)))
        named = {name: _words(name.removeprefix(f"{base}-")) for name in chips}
        fitting = [name for name in chips if named[name] and words.issuperset(named[name])]
        if fitting:
            return max(sorted(fitting), key=lambda name: len(named[name]))
    return base if base in files else None


def list_platforms() -> tuple[str, ...]:
    """Return the platforms that have a file."""
    return tuple(sorted({*_shipped_files(), *_own_files()}))


def get_config_path(platform: str) -> Path | None:
    """Return a platform's file, the user's own before a shipped one; ``None`` if it has none."""
    return _own_files().get(platform) or _shipped_files().get(platform)


def detect_platform() -> str | None:
    """Return the platform of this machine's device; ``None`` if the device names none.

    A file for one chip is named after the platform and words of the chip's name: ``cuda-h200.yaml`` is for an ``NVIDIA
    H200``. The user's own files come before shipped ones; among these, the file with most words wins.

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
