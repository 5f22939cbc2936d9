"""Output that all commands share: tables for people, JSON for programs, rows and progress of long runs."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from ..errors import DispatchError

console = Console(width=None if sys.stdout.isatty() else 130)
_errors = Console(stderr=True)

STATUS_STYLE = {
    "chosen": "bold green",
    "fallback": "cyan",
    "skipped": "dim",
    "ok": "green",
    "right": "green",
    "broken": "bold red",
    "wrong": "bold red",
    "warning": "yellow",
    "nothing to run": "yellow",
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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
"""The option of every command that has something for programs: one document on standard output, and no other output
there.
"""
PidOption = Annotated[
    str | None, typer.Option(help="Describe a running engine: a process ID, or a directory of records.")
]
ResultsOption = Annotated[
    Path | None, typer.Option(help="Write the results to this file, as JSON; to FILE.partial until it is complete.")
]
INTERRUPTED = 130
"""The exit status after Ctrl-C."""


def print_json(data: Any) -> None:
    """Print data as JSON on standard output, and nothing else."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a cell with a status word is coloured. Cells are plain text, never markup."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in NEVER_BROKEN)
    for row in rows:
        cells = [str(cell) for cell in row]
        table.add_row(*(Text(cell, style=STATUS_STYLE.get(cell, "")) for cell in cells))
    console.print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns, without lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(Text(name), Text(value))
    console.print(grid)


def fail(message: str) -> None:
    """Print one error message on standard error."""
    _errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


class Rows:
    """A table that prints each row as soon as it is known, above a long run's progress bar if there is a terminal.

    Args:
        columns: heading → width in characters; longer cells push the next ones to the right.
        quiet: print no row, because standard output is for the JSON.
    """

    def __init__(self, columns: Mapping[str, int], quiet: bool = False) -> None:
        self.columns, self.quiet = columns, quiet
        self._begun = False

    def add(self, cells: Sequence[object]) -> None:
        """Print a row, preceded by the headings if it is the first."""
        if not self._begun:
            self._begun = True
            self.say(self._line(list(self.columns)), "bold")
        self._print(self._line([str(cell) for cell in cells]))

    def say(self, text: Text | str, style: str = "") -> None:
        """Print a line between the rows."""
        self._print(text if isinstance(text, Text) else Text(text, style=style))

    def _print(self, line: Text) -> None:
        if not self.quiet:
            console.print(line, soft_wrap=True)
            sys.stdout.flush()

    def _line(self, cells: Sequence[str]) -> Text:
        line = Text()
        for cell, width in zip(cells, self.columns.values(), strict=True):
            line.append(cell.ljust(width), STATUS_STYLE.get(cell, ""))
            line.append("  ")
        line.rstrip()
        return line


class Advance:
    """The progress of a long run: a bar on a terminal, else a line on standard error for each step that begins."""

    def __init__(self, progress: Progress, task: TaskID, live: bool) -> None:
        self._progress, self._task, self._live = progress, task, live

    def begin(self, what: str) -> None:
        """Show the name of a step that begins."""
        if self._live:
            self._progress.update(self._task, description=what)
        else:
            print(what, file=sys.stderr, flush=True)

    def end(self, weight: float = 1) -> None:
        """Advance by one step; ``weight`` is its share of the total."""
        self._progress.advance(self._task, weight)


@contextmanager
def advancing(total: float) -> Iterator[Advance]:
    """Show the progress of a run; ``total`` is the sum of its steps' weights."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    live = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        yield Advance(progress, progress.add_task("", total=total), live)


class MeasuringCommand(TyperCommand):
    """A command with ``--json``, which prints the results, and ``--out``, which keeps them in a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a file after ``--json``, and name the right option.

        Raises:
            DispatchError: ``--json`` has a value.
        """
        for given, value in itertools.zip_longest(args, args[1:], fillvalue=""):
            option, _, file = given.partition("=")
            if option == "--json" and (file or self._was_a_file(value)):
                file = file or value
                instead = "" if file == "-" else f"; --out {file} writes them to a file"
                raise DispatchError(
                    f"--json takes no value, but got '{file}': it prints the results on standard output{instead}"
                )
        return super().parse_args(ctx, args)

    def _was_a_file(self, value: str) -> bool:
        """Whether the word after ``--json`` is neither an option nor an argument of the command."""
        takes_arguments = any(parameter.param_type_name == "argument" for parameter in self.params)
        is_option = len(value) > 1 and value.startswith("-")
        return bool(value) and not is_option and (not takes_arguments or value == "-" or value.endswith(".json"))


class ResultFile:
    """The JSON file of a long run's results.

    Until the run is complete, the results are in ``FILE.partial``, which every step replaces atomically. So an
    interrupted run keeps its results, and an older FILE stays.

    Args:
        file: the file, or ``None`` for none.
        printed: whether to print the results on standard output, too, at the end.

    Raises:
        DispatchError: it is a directory, or lies in none.
    """

    def __init__(self, file: Path | None, printed: bool = False) -> None:
        self.file, self.printed = file, printed
        check_file(file)
        self.partial: Path | None = None
        if file is not None:
            regular = file.is_file() or not file.exists()  # a device or a pipe gets no partial file
            if regular and os.access(file.parent, os.W_OK):
                self.partial = file.with_name(f"{file.name}.partial")

    def keep(self, data: Any) -> None:
        """Write the results so far."""
        if self.partial is not None:
            new = self.partial.with_name(f"{self.partial.name}.{os.getpid()}")
            new.write_text(_text(data), encoding="utf-8")
            new.replace(self.partial)

    def finish(self, data: Any) -> None:
        """Write the complete results."""
        if self.printed:
            print_json(data)
        if self.partial is not None and self.file is not None:
            self.keep(data)
            self.partial.replace(self.file.resolve())
        elif self.file is not None:
            self.file.write_text(_text(data), encoding="utf-8")

    def stop(self, data: Any) -> str:
        """Keep an interrupted run's results; return their file, or empty."""
        if self.printed:
            print_json(data)
        self.keep(data)
        return "" if self.partial is None else str(self.partial)


def check_file(file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        DispatchError: it is a directory, or lies in none.
    """
    if file is not None and not file.parent.is_dir():
        raise DispatchError(f"there is no directory {file.parent} for {file.name}")
    if file is not None and file.is_dir():
        raise DispatchError(f"{file} is a directory, not a file")


def _text(data: Any) -> str:
    return json.dumps(data, indent=1) + "\n"


def about(seconds: float) -> str:
    """Return an estimated time in words."""
    return f"about {max(1, round(seconds))} s" if seconds < 90 else f"about {round(seconds / 60)} minutes"
