"""What all commands print alike: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(width=None if sys.stdout.isatty() else 130)
_errors = Console(stderr=True)

STATUS_STYLE = {
    "chosen": "bold green",
    "fallback": "cyan",
    "skipped": "dim",
    "ok": "green",
    "broken": "bold red",
    "warning": "yellow",
}

NEVER_BROKEN = (
    "operator",
    "implementation",
    "chosen",
    "kind",
    "vendor",
    "calls",
    "rank",
    "status",
    "setting",
    "package",
)


def print_json(data: Any) -> None:
    """Data for programs, and nothing else, on standard output."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; a cell that is a status word is coloured. Cells are plain text, never markup."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in NEVER_BROKEN)
    for row in rows:
        cells = [str(cell) for cell in row]
        table.add_row(*(Text(cell, style=STATUS_STYLE.get(cell, "")) for cell in cells))
    console.print(table)


def fail(message: str) -> None:
    """One error message on standard error."""
    _errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
