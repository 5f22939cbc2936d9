"""Platforms: which have a YAML file with their defaults, and which one this machine is."""

from __future__ import annotations

from pathlib import Path

from fl_dispatch import devices

CONFIG_DIR = Path(__file__).parents[1] / "config"


def list_platforms() -> tuple[str, ...]:
    """The platforms that have a file."""
    return tuple(sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))


def get_config_path(platform: str) -> Path | None:
    """A platform's file, or ``None`` if it has none."""
    return CONFIG_DIR / f"{platform}.yaml" if platform in list_platforms() else None


def detect_platform() -> str | None:
    """The platform of this machine's device, or ``None`` if the device names none.

    A file for one chip is named after the platform and a word of the chip's name: ``cuda-h200.yaml`` is for an
    ``NVIDIA H200``.
    """
    device = devices.detect_device()
    base = None if device.platform_config is None else Path(device.platform_config).stem
    chips = [name for name in list_platforms() if base and name.startswith(f"{base}-")]
    if chips:  # only then the device is asked for its name
        words = device.device_name(0).lower().split()
        return next((name for name in chips if name.removeprefix(f"{base}-") in words), base)
    return base
