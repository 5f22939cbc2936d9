"""The settings as data: one immutable object with the origin of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from fl_dispatch.errors import ConfigError
from fl_dispatch.logger_manager import DEFAULT_LEVEL

from . import codec
from .codec import FilePath, Names, Origins
from .origins import CODE, DEFAULT, Origin
from .selection_policy import SelectionPolicy

POLICY_FIELDS = tuple(name for name in SelectionPolicy.__dataclass_fields__ if name != "origins")


def _is_policy(name: str) -> bool:
    return name.partition(".")[0] in POLICY_FIELDS


def _default_policy() -> SelectionPolicy:
    return SelectionPolicy(origins=dict.fromkeys(POLICY_FIELDS, DEFAULT))


def _default_oplist_path() -> Path:
    return platformdirs.user_cache_path("fl-dispatch") / "flaggems_enable_oplist.txt"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's settings. ``docs/guide/settings.md`` has each field's variable, YAML key and effect.

    Users do not set ``platform_file``: it names the platform's file that was read, with a hash of its content.
    """

    policy: SelectionPolicy = field(default_factory=_default_policy)
    aten_replacement: bool | None = None
    aten_blacklist: Names = frozenset()
    chip_features: bool = True
    oot_enabled: bool = True
    oot_whitelist: Names | None = None
    oot_blacklist: Names = frozenset()
    native_platform: bool = False
    fuse_rope_kvcache: bool = False
    fuse_one_token: bool = True
    seal_tactics: bool = True
    mxfp4_as_fp8: bool = False
    page_out: FilePath | None = None
    steps: int | None = None
    steps_ms: float = 30.0
    unused_tensors: Names = frozenset()
    log_level: str = DEFAULT_LEVEL
    dispatch_debug: bool = False
    plugin_modules: tuple[str, ...] = ()
    platform: str | None = None
    platform_file: str | None = None
    config_path: FilePath | None = None
    flagcx_path: FilePath | None = None
    oplist_path: FilePath = field(default_factory=_default_oplist_path)
    shadow_share: float = 0.0
    shadow_operators: Names | None = None
    shadow_second: str = "reference"
    shadow_action: str = "log"
    shadow_budget: float = 0.01
    damaged_requests: str = "recompute"
    origins: Origins = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))

    @classmethod
    def of(cls, origins: Mapping[str, Origin] | None = None, **values: Any) -> Settings:
        """Make settings from values by name, including the policy's; the others have their defaults.

        Args:
            origins: origins of values; those that are not named come from code.
        """
        policy = {name: values.pop(name) for name in POLICY_FIELDS if name in values}
        known = {**dict.fromkeys(POLICY_FIELDS, DEFAULT), **dict.fromkeys(policy, CODE)}
        own = dict(origins or {})
        known |= {name: own.pop(name) for name in list(own) if _is_policy(name)}
        return cls(policy=SelectionPolicy(**policy, origins=known), origins=own, **values)

    def value(self, name: str) -> Any:
        """Return a value by its name, also one of the policy."""
        return getattr(self.policy if _is_policy(name) else self, name)

    def origin(self, name: str) -> Origin:
        """Return the origin of a value, or of one operator's part of it: ``prefer``, ``per_op_order.rms_norm``.

        Raises:
            KeyError: no value has this name.
        """
        if _is_policy(name):
            return self.policy.origin(name)
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        default = getattr(self, name) == getattr(Settings(), name)
        return self.origins.get(name) or (DEFAULT if default else CODE)

    def registers(self, *names: str) -> bool:
        """Whether a layer with these names (its class, its operators) is registered with the host.

        If there is a white-list, the blacklist has no effect.
        """
        if not (self.policy.enabled and self.oot_enabled):
            return False
        if self.oot_whitelist is not None:
            return not self.oot_whitelist.isdisjoint(names)
        return self.oot_blacklist.isdisjoint(names)

    def to_json(self) -> str:
        """Return the settings as text, origins included; :meth:`from_json` reads it."""
        return codec.to_text(self)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read the settings that :meth:`to_json` wrote, usually in another process.

        Raises:
            ConfigError: the text was not written by :meth:`to_json` of this version.
        """
        try:
            return codec.from_text(cls, text)
        except ValueError as error:
            raise ConfigError("settings of another process", None, f"cannot be read: {error}") from error

    def __reduce__(self) -> tuple[Callable[[str], Settings], tuple[str]]:
        return Settings.from_json, (self.to_json(),)  # a mapping proxy cannot be pickled
