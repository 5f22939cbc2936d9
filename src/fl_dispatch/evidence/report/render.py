"""The page as text: one file of HTML with its style inside, every text of it escaped."""

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
    return template.render(report=report, style=style, drawn=lambda drawing: Markup(drawing.markup))
