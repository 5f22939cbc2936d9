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
ATEN = "aten::"
"""A unit that is one of PyTorch's own operators, with its overload, begins with it."""


@dataclass(frozen=True)
class Blamed:
    """One thing that makes the result differ.

    Args:
        op: the operator, one of PyTorch's with its overload (``aten::mm.out``), or ``setting`` and its key.
        sites: where it makes the difference; empty for one of PyTorch's, and for a setting.
        of: number of the operator's sites where the policies differ.
        implementations: ids that ran there.
        partners: operators that have to run their bad choice too before this one does harm.
        everywhere: all sites count, because the few that were asked alone all differed.
        kinds: of one of PyTorch's, what its wrong calls have in common, where that is known.
        ranks: where it is wrong, if not in all of several ranks.
    """

    op: str
    sites: tuple[Site, ...] = ()
    of: int = 0
    implementations: tuple[str, ...] = ()
    partners: tuple[str, ...] = ()
    everywhere: bool = False
    ranks: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**vars(self), "sites": [site.scope for site in self.sites]}


@dataclass
class Result:
    """The outcome of an investigation.

    Args:
        differs: whether the bad policy differs by more than rounding.
        share: the difference, in yardsticks; where times are judged, in times of the trusted policy.
        blamed: the causes.
        policy: the document of the policy that avoids them.
        agrees: whether an engine that was started with it agreed.
        candidates: number of sites where the policies differ, and of operators among them.
        slower_than: as asked; 0 where logits are judged.
    """

    differs: bool
    share: float
    yardstick: Yardstick
    blamed: list[Blamed] = field(default_factory=list)
    policy: Document | None = None
    agrees: bool | None = None
    candidates: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    slower_than: float = 0.0


def log2_runs(candidates: int) -> float:
    """The search's target: twice the binary logarithm of the number of candidates."""
    return 2 * math.log2(max(candidates, 2))
