"""Defaults of the platforms: one YAML file each, with the keys of a user's config file.

``docs/guide/settings.md`` lists the keys.
"""

from __future__ import annotations

from typing import Any

from fl_dispatch.errors import ConfigError
from fl_dispatch.settings import load_config_file
from fl_dispatch.settings.document import read_yaml
from fl_dispatch.settings.names import nearest
from fl_dispatch.settings.platforms import CONFIG_DIR, detect_platform, get_config_path, list_platforms


def load_platform_config(platform: str) -> dict[str, Any]:
    """Return the content of a platform's file, as plain data.

    Raises:
        ConfigError: there is no such platform, or its file is wrong.
    """
    path = get_config_path(platform)
    if path is None:
        raise ConfigError("platform", None, f"unknown platform {platform!r}; {nearest(platform, list_platforms())}")
    load_config_file(path, source_kind="platform")
    return read_yaml(path, f"{path.name} (platform)")[0]


__all__ = ["CONFIG_DIR", "detect_platform", "get_config_path", "list_platforms", "load_platform_config"]
