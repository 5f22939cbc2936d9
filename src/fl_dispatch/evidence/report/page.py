"""The elements of a page: sections of parts, and parts of charts and tables. Text is plain; only charts are markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .svg import Drawing


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        text: the text.
        tone: ``good``, ``bad``, ``warn``, ``quiet`` or nothing.
        note: a second, smaller line.
        code: whether the text is a name in code.
    """

    text: str
    tone: str = ""
    note: str = ""
    code: bool = False


@dataclass(frozen=True)
class Table:
    """A table with the names of its rows in the first column.

    Args:
        caption: the table's subject.
        columns: headings; ``#`` at the beginning marks a column of numbers, and is not printed.
        rows: rows with the length of ``columns``.
        folded: the text that opens a long table; a table without it is always shown.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: str = ""

    @classmethod
    def of(cls, caption: str, rows: Sequence[Mapping[str, Cell]], folded: str = "") -> Table:
        """Make a table of at least one row; a row maps each heading to a cell."""
        return cls(caption, list(rows[0]), [list(row.values()) for row in rows], folded)


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption."""

    caption: str
    drawing: Drawing


@dataclass(frozen=True)
class Origin:
    """The origin of a part's figures.

    Args:
        file: the file's name, or another source.
        date, machine: date and machine of the measurement, as stated in the file.
        versions: package → version.
        remarks: further facts from the file, such as the command and the tree.
        lacks: facts that a reader needs to repeat the measurement, and that the file lacks.
    """

    file: str
    date: str = ""
    machine: str = ""
    versions: Sequence[tuple[str, str]] = ()
    remarks: Sequence[tuple[str, str]] = ()
    lacks: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """The contribution of one file, or of one process, to a section.

    Args:
        title: the heading.
        origin: the origin of the figures.
        lead: sentences at the beginning.
        legend: line name → CSS class of its colour.
        charts, tables: the content, in this order.
        earlier: whether another part has a later measurement of the same.
    """

    title: str
    origin: Origin
    lead: Sequence[str] = ()
    legend: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    earlier: bool = False


@dataclass(frozen=True)
class Section:
    """One question and its answers.

    Args:
        anchor, title, question: the section's anchor, title and question.
        fill: the command that produces figures, shown in an empty section.
        parts: the answers.
        summary: a short answer for the top of the page, as number and explanation.
        tone: tone of the short answer, as for a cell.
    """

    anchor: str
    title: str
    question: str
    fill: str
    parts: Sequence[Part] = ()
    summary: tuple[str, str] = ("", "")
    tone: str = ""


@dataclass(frozen=True)
class Report:
    """The page.

    Args:
        made: date, machine and version.
        sections: the sections in their order.
        files: every file that was read, with its part of the page.
    """

    made: str
    sections: Sequence[Section]
    files: Sequence[tuple[str, str]] = field(default_factory=tuple)
