"""Platforms: which have a YAML file with their defaults, and which one this machine is."""

from __future__ import annotations

from pathlib import Path

from fl_dispatch import devices
from fl_dispatch.errors import DeviceError

CONFIG_DIR = Path(__file__).parents[1] / "config"


def _files() -> dict[str, Path]:
    """Platform → its file: this package's, and those that other packages ship with their device's spec.

    Several files may have one name. That of this machine's device counts before this package's, which counts before
    that of a device that is not here.
    """
    files = {path.stem: path for path in CONFIG_DIR.glob("*.yaml")}
    others = [path for device in devices.device_specs() for path in _shipped(device)]
    own = _shipped(devices.detect_device())
    return {path.stem: path for path in others} | files | {path.stem: path for path in own}


def _shipped(device: devices.DeviceSpec) -> list[Path]:
    """The file beside a device's spec, and those for single chips, as :func:`detect_platform` says."""
    shipped = device.platform_config
    return [shipped, *shipped.parent.glob(f"{shipped.stem}-*.yaml")] if isinstance(shipped, Path) else []


def list_platforms() -> tuple[str, ...]:
    """The platforms that have a file."""
    return tuple(sorted(_files()))


def get_config_path(platform: str) -> Path | None:
    """A platform's file, or ``None`` if it has none."""
    return _files().get(platform)


def detect_platform() -> str | None:
    """The platform of this machine's device, or ``None`` if the device names none.

    A file for one chip is named after the platform and a word of the chip's name: ``cuda-h200.yaml`` is for an
    ``NVIDIA H200``.

    Raises:
        DeviceError: the device names a file that does not exist.
    """
    device = devices.detect_device()
    if device.platform_config is None:
        return None
    base, platforms = Path(device.platform_config).stem, list_platforms()
    if base not in platforms:
        raise DeviceError(device.name, f"platform_config names '{base}', but there is only {', '.join(platforms)}")
    chips = [name for name in platforms if name.startswith(f"{base}-")]
    if chips:  # only then the device is asked for its name
        words = device.device_name(0).lower().split()
        return next((name for name in chips if name.removeprefix(f"{base}-") in words), base)
    return base
