"""Read files that the user wrote, as plain data with the line of every part.

Loading is safe: only mappings, lists and plain scalars; no tags that build objects, no aliases, no duplicate keys,
bounded size.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

import yaml

from fl_dispatch.errors import ConfigError, ConfigFileNotFoundError

from .place import Path, Place, show

MAX_BYTES = 1 << 18
MAX_NODES = 20_000  # mappings, lists, keys and values: about a second of parsing
MAX_NUMBER = 100  # characters; converting a number takes time that grows with the square of its length
_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}


def read_text(path: str | os.PathLike[str], place: Place, most: int = MAX_BYTES) -> str:
    """Return the text of a regular file; links are followed, because the user named the path.

    Raises:
        ConfigFileNotFoundError: there is no such file.
        ConfigError: it is not a regular file, not readable, larger than ``most`` bytes or not UTF-8.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise place.error("is not a regular file")
            content = file.read(most + 1)
    except FileNotFoundError:
        raise ConfigFileNotFoundError(place.source, place.key, "config file not found") from None
    except IsADirectoryError:
        raise place.error("is a directory, not a regular file") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise place.error(f"cannot be read: {error}") from error
    if content is None:  # a regular file of the kernel that has nothing to read yet
        raise place.error("cannot be read: it holds no data")
    if len(content) > most:
        raise place.error(f"is larger than {most} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise place.error(f"is not UTF-8: {error}") from error


def read_yaml(path: str | os.PathLike[str], name: str) -> tuple[dict[str, Any], Place]:
    """Read a YAML file with one mapping, and its place with all lines; an empty file is an empty mapping.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    text = read_text(path, Place(name))
    lines: dict[Path, int] = {}
    place = Place(name, lines=lines)
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return {}, place
        if not isinstance(root, yaml.MappingNode):
            raise Place(f"{name}, line {root.start_mark.line + 1}").error("must be a mapping of settings")
        return _plain(root, place, lines), place
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise Place(where).error(f"is not valid YAML: {problem}") from error
    except RecursionError:
        raise Place(name).error("is nested too deeply") from None


def read_json(path: str, place: Place, most: int = MAX_BYTES) -> Any:
    """Read a JSON file of at most ``most`` bytes.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    text = read_text(path, place, most)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        plain = dict(pairs)
        if len(plain) != len(pairs):
            keys = [key for key, _ in pairs]
            raise place.error(f"has a key twice: {show(next(key for key in keys if keys.count(key) > 1))}")
        return plain

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise Place(f"{place.name}, line {error.lineno}").error(f"is not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise place.error(f"cannot be read: {error}") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounded data: aliases are refused, because they can stand for any amount of data."""

    _nodes_left = MAX_NODES

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} keys and values", problem_mark=mark)
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def _plain(node: yaml.Node, place: Place, lines: dict[Path, int]) -> Any:
    lines.setdefault(place.path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_plain(part, place.at(index), lines) for index, part in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        plain: dict[str, Any] = {}
        for key_node, value_node in node.value:
            inside = place.at(str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?")
            lines[inside.path] = key_node.start_mark.line + 1
            key = _scalar(key_node, inside) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise inside.error(f"a key must be a string, not {show(key_node.value)}; quote it")
            if key in plain:
                raise inside.error("is there twice")
            plain[key] = _plain(value_node, inside, lines)
        return plain
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, place)
    raise place.error(f"tag {show(node.tag)} is not allowed")


def _scalar(node: yaml.ScalarNode, place: Place) -> Any:
    if node.tag not in _SCALARS:
        allowed = "only strings, numbers and booleans are allowed"
        raise place.error(f"{show(node.value)}: {allowed}, not {show(node.tag)}; quote it")
    number = node.tag.endswith((":int", ":float"))
    if number and len(node.value) > MAX_NUMBER:
        raise place.error(f"{show(node.value)}: the number is too long")
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (ValueError, KeyError, OverflowError, IndexError):
        raise place.error(f"{show(node.value)} is not a value of type {node.tag.rpartition(':')[2]}") from None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise place.error("the number is too large")
    return value
