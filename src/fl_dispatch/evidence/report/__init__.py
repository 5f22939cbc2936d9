"""One page of HTML about everything that was measured and chosen: what ``fl report`` writes.

A part of the page is made from one file, or from what this machine or its workers say. A module of this package knows
one kind of file: whether a file is of that kind, and what the page shows of it. ``build`` puts the parts together;
``render`` makes the page, which loads nothing from anywhere.
"""

from __future__ import annotations

from .build import build
from .page import Report
from .render import render

__all__ = ["Report", "build", "render"]
