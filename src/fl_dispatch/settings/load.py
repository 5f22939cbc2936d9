"""Read the settings: file over environment over platform file over default, item by item, never merged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any, Literal

from fl_dispatch import devices
from fl_dispatch.logger_manager import get_logger

from . import platforms, tuned
from .document import read_yaml
from .items import ITEMS, Item, Variable, variable_names
from .model import Settings
from .names import near_miss, nearest
from .origins import Origin
from .place import Place

logger = get_logger(__name__)

PREFIX = "VLLM_FL_"
_EXCLUSIVE = (("flagos_whitelist", "flagos_blacklist"), ("oot_whitelist", "oot_blacklist"))
_BY_FIELD = {item.field: item for item in ITEMS}
_PARTS = ("per_op_order", "op_tuned")  # fields with an origin for each part


class _Found:
    """Values found so far, each with its origin."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def read(self, item: Item, plain: Any, place: Place) -> None:
        value = item.read(plain, place)
        self.values[item.field] = value
        self.origins[item.field] = place.origin
        if item.field in _PARTS:
            self.origins.update({f"{item.field}.{key}": place.at(key).origin for key, _ in value})

    def take(self, item: Item, other: _Found) -> None:
        """Take the other's value of an item, if it has one."""
        if item.field in other.values:
            self.values[item.field] = other.values[item.field]
            self.origins.update({key: o for key, o in other.origins.items() if key.partition(".")[0] == item.field})

    def settings(self) -> Settings:
        return Settings.of(self.origins, **self.values)


class _Environment:
    """The environment under one or more prefixes; the first prefix with a variable decides."""

    def __init__(self, environ: Mapping[str, str], prefixes: tuple[str, ...]) -> None:
        self._environ, self._prefixes = environ, prefixes

    def find(self, variable: Variable) -> tuple[Place, str] | None:
        """Return the place that sets a variable, and its text; an empty variable counts as unset."""
        for name in self._spellings(variable.name):
            text = self._environ.get(name, "").strip()
            if text:
                return variable.place(name, text), text
        return None

    def place(self, field: str) -> Place | None:
        """Return the place that sets a field's variable."""
        hits = (self.find(variable) for variable in _BY_FIELD[field].variables)
        return next((hit[0] for hit in hits if hit), None)

    def check_names(self) -> None:
        """Refuse near misses of our variables; log a WARNING for other unknown variables with a prefix."""
        bare = [name for name in variable_names() if not name.startswith(PREFIX)]
        for name in sorted(self._environ):
            meant = near_miss(name, bare, cutoff=0.89)  # stricter than elsewhere: any program may set it
            if meant is not None:
                raise Place(f"environment variable {name}").error(f"has no effect; did you mean {meant}?")
        known = {v.name.removeprefix(PREFIX) for item in ITEMS for v in item.variables if v.name.startswith(PREFIX)}
        for name in sorted(self._environ):
            prefix = next((p for p in self._prefixes if name.upper().startswith(p)), None)
            if prefix is None:
                self._check_prefix(name, known)
                continue
            if name in {prefix + rest for rest in known}:
                continue
            rest = name[len(prefix) :]
            meant = rest.upper() if rest.upper() in known else near_miss(rest, known)
            place = Place(f"environment variable {name}")
            if meant is not None:
                raise place.error(f"there is no such variable; did you mean {prefix}{meant}?")
            logger.warning("%s: there is no such variable, it has no effect; %s", place.name, nearest(rest, known))

    def _check_prefix(self, name: str, known: Iterable[str]) -> None:
        """Refuse one of our variables with a misspelt prefix."""
        for rest in filter(name.upper().endswith, known):
            meant = near_miss(name[: -len(rest)], self._prefixes, cutoff=0.85)  # one letter of the prefix
            if meant is not None:
                raise Place(f"environment variable {name}").error(f"has no effect; did you mean {meant}{rest}?")

    def _spellings(self, name: str) -> list[str]:
        if not name.startswith(PREFIX):
            return [name]
        return [prefix + name.removeprefix(PREFIX) for prefix in self._prefixes]


def load_settings(environ: Mapping[str, str] | None = None, *, prefixes: tuple[str, ...] = (PREFIX,)) -> Settings:
    """Return the user's settings. Reads files, logs WARNINGs, changes nothing.

    Args:
        environ: the environment; ``None`` takes the process's.
        prefixes: the host's prefixes of variables, in order of precedence.

    Raises:
        ConfigError: a setting is wrong.
    """
    environment = _Environment(os.environ if environ is None else environ, prefixes)
    environment.check_names()
    for white, black in _EXCLUSIVE:
        first, second = environment.place(white), environment.place(black)
        if first and second:
            raise first.error(f"a white-list and a blacklist exclude each other; unset it or the {second.name}")

    found = _Found()
    for field in ("config_path", "platform"):
        _read_variables(_BY_FIELD[field], environment, found)
    config_path: Path | None = found.values.get("config_path")
    if config_path is not None:
        place = environment.place("config_path")
        logger.debug("settings come from %s (%s)", config_path, place and place.name)
        file = _read_file(config_path, str(config_path))
    else:
        file = _read_platform(found.values.get("platform"))
    for item in ITEMS:
        if item.field in ("config_path", "platform"):
            continue
        if config_path is not None and item.yaml_key is not None:
            _warn_ignored(item, environment, config_path)
            found.take(item, file)
        elif not _read_variables(item, environment, found):
            found.take(item, file)
    if config_path is None:
        found.values |= {name: file.values[name] for name in ("platform_file",) if name in file.values}
        _prefer_beats_tuning(environment, found)
    return found.settings()


def load_config_file(path: str | os.PathLike[str], *, source_kind: Literal["user", "platform"] = "user") -> Settings:
    """Return the settings of one YAML file; missing items have their defaults. ``origins`` has only items of the file.

    Args:
        path: the file.
        source_kind: who wrote the file, for the origins.

    Raises:
        ConfigError: it is missing (then also a ``FileNotFoundError``), unreadable or wrong.
    """
    name = os.fspath(path) if source_kind == "user" else f"{os.path.basename(path)} (platform)"
    return _read_file(path, name).settings()


def _read_file(path: str | os.PathLike[str], name: str) -> _Found:
    document, place = read_yaml(path, name)
    found, known = _Found(), {item.yaml_key: item for item in ITEMS if item.yaml_key is not None}
    for key, plain in document.items():
        inside = place.at(key)
        if key not in known:
            raise inside.error(_unknown_key(key, known))
        if plain is None:
            raise inside.error("has no value; leave the key out, or write [] for an empty list")
        found.read(known[key], plain, inside)
    return found


def _unknown_key(key: str, known: Mapping[str, Item]) -> str:
    item = _BY_FIELD.get(key)
    if item is not None and item.yaml_key is None:
        return f"is no key of this file; it is set by the environment variable {item.variables[0].name}"
    return f"unknown key; {nearest(key, known)}"


def _read_platform(forced: str | None) -> _Found:
    """Read the defaults of a platform; its stale tuning does not count, and one WARNING and the origin name it."""
    platform = forced or platforms.detect_platform()
    path = platforms.get_config_path(platform) if platform is not None else None
    if path is None:
        return _Found()
    own = platforms.is_own(path)
    found = _read_file(path, f"{path} (platform, your own)" if own else f"{path.name} (platform)")
    found.values["platform_file"] = platforms.identity(path)
    logger.log(INFO if own else DEBUG, "the platform's defaults come from %s", path)
    if own and (stale := tuned.stale_entries(path)):
        why = tuned.in_words(stale)
        logger.warning("%s was tuned with something else, and does not count for %s; fl tune measures again", path, why)
        shipped = platforms.shipped_path(devices.detect_device())
        _leave_out(stale, found, _Found() if shipped is None else _read_file(shipped, f"{shipped.name} (platform)"))
        found.origins["op_tuned"] = Origin(f"{found.origins.get('op_tuned', path)}; stale: {why}")
        found.values["platform_file"] = platforms.identity(path, f"stale: {why}")  # ranks may differ in that
    return found


def _leave_out(stale: Mapping[str, str], found: _Found, shipped: _Found) -> None:
    """Replace stale entries of a tuned file with those of the shipped file."""
    own, other = (dict(file.values.get("op_tuned", ())) for file in (found, shipped))
    left = {key for key in {*own, *other} if tuned.EVERY in stale or key.partition("@")[0] in stale}
    rules = {key: one for key, one in own.items() if key not in left} | {key: other[key] for key in left & {*other}}
    found.values["op_tuned"] = tuple(sorted(rules.items()))
    found.origins |= {name: shipped.origins[name] for key in left & {*other} if (name := f"op_tuned.{key}")}


def _read_variables(item: Item, environment: _Environment, found: _Found) -> bool:
    """Take an item from its first variable that is set."""
    hits: list[tuple[Variable, Place, str]] = []
    for variable in item.variables:
        hit = environment.find(variable)
        if hit is not None:
            hits.append((variable, *hit))
    if not hits:
        return False
    first, place, text = hits[0]
    found.read(item, first.split(text, place), place)
    for other, ignored, _ in hits[1:]:
        if other.ours:
            logger.warning("%s is ignored, because the %s is set", ignored.name, place.name)
    return True


def _prefer_beats_tuning(environment: _Environment, found: _Found) -> None:
    """Drop the platform's ``op_tuned`` if the user chose ``prefer``: the rules refine the ``prefer`` of their file."""
    place = environment.place("prefer")
    if place is not None and "op_tuned" in found.values:
        logger.info("op_tuned (%s) is left out, because the %s is set", found.origins["op_tuned"], place.name)
        del found.values["op_tuned"]
        found.origins = {key: o for key, o in found.origins.items() if key.partition(".")[0] != "op_tuned"}


def _warn_ignored(item: Item, environment: _Environment, config_path: Path) -> None:
    for variable in item.variables:
        hit = environment.find(variable)
        if hit is not None:
            logger.warning("%s is ignored, because the config file %s decides", hit[0].name, config_path)
