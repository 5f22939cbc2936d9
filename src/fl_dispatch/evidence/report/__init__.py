"""The page of HTML that ``fl report`` writes, about all measurements and choices.

A part of the page is made from one file, or from this machine's or its workers' state. A module of this package knows
one kind of file: how to recognise it, and how to show it. ``build`` puts the parts together; ``render`` makes the page,
which loads nothing from anywhere.
"""

from __future__ import annotations

from .build import build
from .page import Report
from .render import render

__all__ = ["Report", "build", "render"]
