"""The page as text: one file of HTML with its style inside and all its text escaped."""

from __future__ import annotations

from pathlib import Path

from ...errors import DispatchError
from .page import Report

TEMPLATES = Path(__file__).parent


def render(report: Report) -> str:
    """The HTML.

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
    """Headings of a table, each in a line → the class of tables that have these."""
    parts = [part for section in report.sections for part in section.parts]
    found = dict.fromkeys("\n".join(table.columns) for part in parts for table in part.tables)
    return {columns: f"h{number}" for number, columns in enumerate(found)}


def _rules(names: dict[str, str]) -> str:
    """Style that writes its heading before each cell where a screen is too narrow for columns.

    Once for each kind of table, because a table may have thousands of cells.
    """
    rules = [
        f'.{name} td:nth-child({place}):not(:empty)::before {{ content: "{_quoted(heading.removeprefix("#"))}: "; }}'
        for columns, name in names.items()
        for place, heading in enumerate(columns.split("\n"), 1)
        if place > 1
    ]
    return "\n".join(["@media (max-width: 40rem) {", *rules, "}"])


def _quoted(text: str) -> str:
    """Text inside a string of a style sheet: letters, digits and spaces as they are, all else by number."""
    return "".join(one if one == " " or (one.isascii() and one.isalnum()) else f"\\{ord(one):x} " for one in text)
