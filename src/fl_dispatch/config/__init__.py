"""Defaults of the platforms: one YAML file each, with the keys of a user's config file (see ``docs/settings.md``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_dispatch.errors import ConfigError

CONFIG_DIR = Path(__file__).parent


def list_platforms() -> tuple[str, ...]:
    """The platforms that have a file."""
    return tuple(sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))


def get_config_path(platform: str) -> Path | None:
    """A platform's file, or ``None`` if it has none."""
    return CONFIG_DIR / f"{platform}.yaml" if platform in list_platforms() else None


def load_platform_config(platform: str) -> dict[str, Any]:
    """What a platform's file says, as plain data.

    Raises:
        ConfigError: there is no such platform, or its file is wrong.
    """
    from fl_dispatch.settings import load_config_file
    from fl_dispatch.settings.document import read_yaml
    from fl_dispatch.settings.names import nearest

    path = get_config_path(platform)
    if path is None:
        raise ConfigError("platform", None, f"unknown platform {platform!r}; {nearest(platform, list_platforms())}")
    load_config_file(path, source_kind="platform")
    return read_yaml(path, f"{path.name} (platform)")[0]


def detect_platform() -> str | None:
    """The platform of this machine's device, or ``None`` if the device names none.

    A file for one chip is named after the platform and a word of the chip's name: ``cuda-h200.yaml`` is for an
    ``NVIDIA H200``.
    """
    from fl_dispatch.devices import detect_device

    device = detect_device()
    base = device.platform_config
    chips = [name for name in list_platforms() if base and name.startswith(f"{base}-")]
    if chips:  # only then the device is asked for its name
        words = device.device_name(0).lower().split()
        return next((name for name in chips if name.removeprefix(f"{base}-") in words), base)
    return base


__all__ = ["CONFIG_DIR", "detect_platform", "get_config_path", "list_platforms", "load_platform_config"]
