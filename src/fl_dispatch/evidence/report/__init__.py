"""The HTML page of ``fl report``, with all measurements and choices.

Each part of the page comes from one file, or from the state of this machine or its workers. Each module for a kind of
file recognises it and shows it. ``build`` combines the parts; ``render`` makes the page, which needs no other file and
no network.
"""

from __future__ import annotations

from .build import build
from .page import Report
from .render import render

__all__ = ["Report", "build", "render"]
