"""Findings of an investigation, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .choices import Site
from .documents import Document
from .yardstick import Yardstick

SETTING = "setting "
"""Prefix of a unit that is a setting."""
ATEN = "aten::"
"""Prefix of a unit that is one of PyTorch's own operators, with its overload."""


@dataclass(frozen=True)
class Blamed:
    """One cause of the difference.

    Args:
        op: the operator, one of PyTorch's with its overload (``aten::mm.out``), or ``setting`` and its key.
        sites: the sites where it makes the difference; empty for PyTorch's operators and settings.
        of: number of the operator's sites where the policies differ.
        implementations: ids that ran there.
        partners: operators that must also run their bad choice for this one to do harm.
        everywhere: whether all sites count, because the few that were tested alone all differed.
        kinds: what wrong calls of a PyTorch operator have in common, if known.
        ranks: the wrong ranks, if not all.
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
        share: the difference, in yardsticks, or in times of the trusted policy if times are judged.
        blamed: the causes.
        policy: the document of the policy that avoids them.
        agrees: whether an engine with this policy agreed.
        candidates: number of sites where the policies differ, and of operators among them.
        slower_than: the requested factor; 0 if logits are judged.
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
    """Return the search's target: twice the binary logarithm of the number of candidates."""
    return 2 * math.log2(max(candidates, 2))
