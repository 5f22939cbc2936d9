"""A place in the user's configuration, for origins and error messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fl_dispatch.errors import ConfigError

from .origins import Origin

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Place:
    """A file or a variable, and a path inside it.

    Args:
        name: the file or the variable, as messages name it.
        path: keys and positions from its top.
        lines: the line of each path, where lines are known.
    """

    name: str
    path: Path = ()
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False, repr=False)

    def at(self, *steps: str | int) -> Place:
        """Return a place further inside."""
        return replace(self, path=self.path + steps)

    @property
    def source(self) -> str:
        """Return the file or variable, with the line of the innermost part that has one."""
        for length in range(len(self.path), 0, -1):
            if self.path[:length] in self.lines:
                return f"{printable(self.name)}, line {self.lines[self.path[:length]]}"
        return printable(self.name)

    @property
    def key(self) -> str | None:
        """Return the path as one word, such as ``op_backends.rms_norm[0]``."""
        text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return shorten(printable(text.removeprefix("."))) or None

    @property
    def origin(self) -> Origin:
        """Return the place as the origin of a value."""
        return Origin(self.source)

    def error(self, problem: str) -> ConfigError:
        """Return the error for a problem at this place."""
        return ConfigError(self.source, self.key, problem)


def printable(text: str) -> str:
    """Return text on one line, without characters that a terminal would interpret."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shorten(text: str, limit: int = 100) -> str:
    """Shorten text so that it fits in a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show(value: Any) -> str:
    """Return a value as messages print it."""
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
