"""The elements of a page: sections of parts, and parts of charts and tables. Text is plain; only charts are markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .svg import Drawing


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        text: its text.
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
        columns: headings; one that begins with ``#`` is of numbers, and is printed without that sign.
        rows: as long as ``columns``.
        folded: the text that opens a long table; without one the table is always shown.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption."""

    caption: str
    drawing: Drawing


@dataclass(frozen=True)
class Origin:
    """The place that the figures of a part come from.

    Args:
        file: its name, or what else said it.
        date, machine: when and where it was measured, as the file says.
        versions: package → version.
        remarks: sentences of the file about itself: the command, the tree.
        lacks: what a reader needs to measure again, and the file does not say.
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
        title: its heading.
        origin: where its figures come from.
        lead: sentences before everything else.
        legend: line name → class of its colour.
        charts, tables: in this order.
        earlier: whether another part has the same, measured later.
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
        anchor, title, question: of the section.
        fill: the command that brings figures, for a section without any.
        parts: the answers.
        glance: the answer in a few words, as number and explanation, for the top of the page.
        tone: of that answer, as a cell's.
    """

    anchor: str
    title: str
    question: str
    fill: str
    parts: Sequence[Part] = ()
    glance: tuple[str, str] = ("", "")
    tone: str = ""


@dataclass(frozen=True)
class Report:
    """The page.

    Args:
        made: when, where and by which version.
        sections: in their order.
        files: every file that was read, and its part of the page.
    """

    made: str
    sections: Sequence[Section]
    files: Sequence[tuple[str, str]] = field(default_factory=tuple)
