"""The user's settings: read once per process into one immutable object with the origin of each value.

``docs/guide/settings.md`` is the user's page. Parts: ``model`` (the data), ``selection_policy`` (settings that select
implementations), ``origins``, ``codec`` (values as text), ``items`` (the table of settings), ``values`` (rules of valid
values), ``load`` (precedence), ``document`` (safe reading), ``names`` (near misses), ``place`` (where a value is set).
"""

from __future__ import annotations

from fl_dispatch.logger_manager import begin_logging, set_log_level

from .items import ITEMS, Item, Variable, variable_names
from .load import PREFIX, load_config_file, load_settings
from .model import Settings
from .names import register_layers
from .origins import Origin
from .selection_policy import TunedRule

_DEFAULT_PREFIXES = (PREFIX,)

_settings: Settings | None = None
_prefixes: tuple[str, ...] = _DEFAULT_PREFIXES


def get_settings() -> Settings:
    """Return the process's settings; the first use reads them and applies their log level.

    Raises:
        ConfigError: a setting is wrong. The next call reads again.
    """
    if _settings is not None:
        return _settings
    begin_logging()
    return install_settings(peek_settings())


def peek_settings() -> Settings:
    """Read the settings as they are now, without installing them.

    Raises:
        ConfigError: a setting is wrong.
    """
    return load_settings(prefixes=_prefixes)


def install_settings(settings: Settings) -> Settings:
    """Install the process's settings, for example those of a worker's parent."""
    global _settings
    set_log_level(settings.log_level)
    _settings = settings
    return settings


def reset_settings(prefixes: tuple[str, ...] | None = None) -> None:
    """Drop the settings, so that the next use reads them again.

    Args:
        prefixes: the host's new prefixes of variables; ``None`` keeps them.
    """
    global _settings, _prefixes
    _settings = None
    _prefixes = prefixes or _prefixes


__all__ = [
    "ITEMS",
    "Item",
    "Origin",
    "Settings",
    "TunedRule",
    "Variable",
    "get_settings",
    "install_settings",
    "load_config_file",
    "load_settings",
    "peek_settings",
    "register_layers",
    "reset_settings",
    "variable_names",
]
