"""Findings of an investigation, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .choices import Site
from .documents import Document
from .yardstick import Yardstick

SETTING = "setting "
"""A unit that is no operator begins with it."""


@dataclass(frozen=True)
class Blamed:
    """One thing that makes the result differ.

    Args:
        op: the operator, or ``setting`` and its key.
        sites: where; empty for a setting.
        of: how many sites of the operator differ between the policies.
        implementations: that ran there.
        partners: operators without whose bad choice it does no harm.
        everywhere: all sites count because some were asked alone.
        ranks: where it is wrong, if not in all of several ranks.
    """

    op: str
    sites: tuple[Site, ...] = ()
    of: int = 0
    implementations: tuple[str, ...] = ()
    partners: tuple[str, ...] = ()
    everywhere: bool = False
    ranks: tuple[int, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**vars(self), "sites": [site.scope for site in self.sites]}


@dataclass
class Result:
    """The outcome of an investigation.

    Args:
        differs: whether the bad policy differs at all by more than rounding.
        share: by how many yardsticks.
        blamed: what for.
        policy: the document of the policy that avoids it.
        agrees: whether an engine that was started with it agreed.
        candidates: sites where the policies differ; operators among them.
    """

    differs: bool
    share: float
    yardstick: Yardstick
    blamed: list[Blamed] = field(default_factory=list)
    policy: Document | None = None
    agrees: bool | None = None
    candidates: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)


def log2_runs(candidates: int) -> float:
    """Twice the binary logarithm of the candidates: what the search aims at."""
    return 2 * math.log2(max(candidates, 2))
