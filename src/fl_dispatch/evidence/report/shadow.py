"""Shadow: live calls that were computed a second time, and where the results differed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .files import Source
from .page import Cell, Part, Section, Table

EMPTY = Section(
    "shadow",
    "Shadow",
    "Live calls that a second implementation computed too, and the differences from the operator's tolerance.",
    "fl shadow, or a server with shadow mode on",
)
KEYS = ("shadow", "shadow_findings")


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file has findings of shadow mode."""
    return any(key in data for key in KEYS)


def parts(sources: Iterable[Source]) -> list[Part]:
    """A part a file."""
    return [_part(source) for source in sources]


def glance(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """How many findings there are."""
    count = sum(len(_rows(source.data)) for source in sources)
    return (str(count), "differences found in live calls"), "bad" if count else "good"


def _part(source: Source) -> Part:
    rows = _rows(source.data)
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    cells = [[Cell(_said(row.get(column))) for column in columns] for row in rows]
    tables = [Table("Findings", columns, cells)] if rows else []
    lead = [] if rows else ["Nothing differed by more than an operator tolerates."]
    return Part(source.origin.machine or source.path.name, source.origin, lead, tables=tables)


def _rows(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = next(data[key] for key in KEYS if key in data)
    found = given.get("findings", given) if isinstance(given, Mapping) else given
    rows = list(found.values()) if isinstance(found, Mapping) else list(found or ())
    return [row for row in rows if isinstance(row, Mapping)]


def _said(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
