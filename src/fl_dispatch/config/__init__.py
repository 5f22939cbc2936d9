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
    """The platform of this machine's device, or ``None`` if the device names none."""
    from fl_dispatch.device import detect_device

    return detect_device().platform_config


__all__ = ["CONFIG_DIR", "detect_platform", "get_config_path", "list_platforms", "load_platform_config"]
