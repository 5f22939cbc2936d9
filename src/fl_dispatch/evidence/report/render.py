"""Render the page as one HTML file with inline style and escaped text."""

from __future__ import annotations

from pathlib import Path

from ...errors import DispatchError
from .page import Report

TEMPLATES = Path(__file__).parent


def render(report: Report) -> str:
    """Return the HTML.

    Raises:
        DispatchError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise DispatchError("a report needs jinja2: pip install 'fl-dispatch[report]'") from error
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    template = environment.get_template("page.html.j2")
    names = _headings(report)
    headings = {"names": names, "rules": Markup(_rules(names))}
    return template.render(report=report, style=style, headings=headings, drawn=lambda drawing: Markup(drawing.markup))


def _headings(report: Report) -> dict[str, str]:
    """Map headings, joined by line breaks, to the CSS class of tables with these headings."""
    parts = [part for section in report.sections for part in section.parts]
    found = dict.fromkeys("\n".join(table.columns) for part in parts for table in part.tables)
    return {columns: f"h{number}" for number, columns in enumerate(found)}


def _rules(names: dict[str, str]) -> str:
    """Return CSS rules that show each cell's heading before it on screens too narrow for columns.

    The rules exist once per kind of table, because a table may have thousands of cells.
    """
    rules = [
        f'.{name} td:nth-child({place}):not(:empty)::before {{ content: "{_quoted(heading.removeprefix("#"))}: "; }}'
        for columns, name in names.items()
        for place, heading in enumerate(columns.split("\n"), 1)
        if place > 1
    ]
    return "\n".join(["@media (max-width: 40rem) {", *rules, "}"])


def _quoted(text: str) -> str:
    """Quote text for a CSS string: letters, digits and spaces unchanged, all else by character code."""
    return "".join(one if one == " " or (one.isascii() and one.isalnum()) else f"\\{ord(one):x} " for one in text)
