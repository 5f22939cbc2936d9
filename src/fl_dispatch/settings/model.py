"""The settings as data: one immutable object, and where each value of it came from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from fl_dispatch.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Args:
        source: ``default``, ``code``, ``environment variable NAME``, ``/path/x.yaml, line 3`` or
            ``cpu.yaml (platform), line 2``.
    """

    source: str

    def __str__(self) -> str:
        return self.source


DEFAULT = Origin("default")
CODE = Origin("code")


@dataclass(frozen=True, kw_only=True)
class TunedRule:
    """An order of tokens for the calls that fit; a condition that is ``None`` always fits.

    Args:
        order: tokens, tried first to last.
        dtype: name of the leading tensor's dtype, such as ``bfloat16``.
        tokens: smallest and largest number of tokens, inclusive; a largest of ``None`` has no bound.
        phase: ``prefill`` or ``decode``.
    """

    order: tuple[str, ...]
    dtype: str | None = None
    tokens: tuple[int, int | None] | None = None
    phase: str | None = None


def _default_oplist_path() -> Path:
    return platformdirs.user_cache_path("fl-dispatch") / "flaggems_enable_oplist.txt"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for. ``docs/settings.md`` has each field's variable, YAML key and effect."""

    enabled: bool = True
    prefer: str = "flagos"
    strict: bool = False
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    op_tuned: tuple[tuple[str, tuple[TunedRule, ...]], ...] = ()
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] = frozenset()
    use_flaggems: bool = True
    flagos_whitelist: frozenset[str] | None = None
    flagos_blacklist: frozenset[str] = frozenset()
    aten_replacement: bool | None = None
    chip_features: bool = True
    oot_enabled: bool = True
    oot_whitelist: frozenset[str] | None = None
    oot_blacklist: frozenset[str] = frozenset()
    native_platform: bool = False
    log_level: str = "INFO"
    dispatch_debug: bool = False
    plugin_modules: tuple[str, ...] = ()
    platform: str | None = None
    config_path: Path | None = None
    flagcx_path: Path | None = None
    oplist_path: Path = field(default_factory=_default_oplist_path)
    batch_invariant: bool = False
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))

    def origin(self, item: str) -> Origin:
        """Where a field was set, or one operator's part of it: ``prefer``, ``per_op_order.rms_norm``.

        Raises:
            KeyError: there is no such field.
        """
        name = item.partition(".")[0]
        known = self.origins.get(item) or self.origins.get(name)
        if known is not None:
            return known
        if name not in _FIELDS:
            raise KeyError(item)
        return DEFAULT if getattr(self, name) == getattr(Settings(), name) else CODE

    def registers(self, *names: str) -> bool:
        """Whether a layer with these names (its class, its operators) is registered with the host.

        A white-list leaves no say to the blacklist.
        """
        if not (self.enabled and self.oot_enabled):
            return False
        if self.oot_whitelist is not None:
            return not self.oot_whitelist.isdisjoint(names)
        return self.oot_blacklist.isdisjoint(names)

    def to_json(self) -> str:
        """The settings as text, origins included; :meth:`from_json` gives them back."""
        return json.dumps({name: _plain(getattr(self, name)) for name in _FIELDS})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that :meth:`to_json` wrote, usually in another process.

        Raises:
            ConfigError: the text was not written by :meth:`to_json` of this version.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            if plain.keys() != set(_FIELDS):
                raise ValueError(f"fields differ: {sorted(plain.keys() ^ set(_FIELDS))}")
            return cls(**{name: _restore(name, value) for name, value in plain.items()})
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ConfigError("settings of another process", None, f"cannot be read: {error}") from error

    def __reduce__(self) -> tuple[Callable[[str], Settings], tuple[str]]:
        return Settings.from_json, (self.to_json(),)  # a mapping proxy cannot be pickled


_FIELDS = tuple(item.name for item in dataclasses.fields(Settings))


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, TunedRule):
        return _plain(vars(value))
    return str(value) if isinstance(value, Path | Origin) else value


def _rules(plain: list[dict[str, Any]]) -> tuple[TunedRule, ...]:
    return tuple(
        TunedRule(
            order=tuple(rule["order"]),
            dtype=rule["dtype"],
            tokens=None if rule["tokens"] is None else (rule["tokens"][0], rule["tokens"][1]),
            phase=rule["phase"],
        )
        for rule in plain
    )


_RESTORE: Mapping[str, Callable[[Any], Any]] = {
    "per_op_order": lambda plain: tuple((op, tuple(order)) for op, order in plain),
    "op_tuned": lambda plain: tuple((op, _rules(rules)) for op, rules in plain),
    "allow_vendors": frozenset,
    "deny_vendors": frozenset,
    "flagos_whitelist": frozenset,
    "flagos_blacklist": frozenset,
    "oot_whitelist": frozenset,
    "oot_blacklist": frozenset,
    "plugin_modules": tuple,
    "config_path": Path,
    "flagcx_path": Path,
    "oplist_path": Path,
    "origins": lambda plain: {name: Origin(source) for name, source in plain.items()},
}


def _restore(name: str, value: Any) -> Any:
    return _RESTORE[name](value) if name in _RESTORE and value is not None else value
