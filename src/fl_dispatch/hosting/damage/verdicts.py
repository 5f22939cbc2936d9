"""Decide what happens to damaged requests: once for all ranks, in the host's scheduler."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...shadow.findings import Findings
from ...shadow.origin import Origin

KEPT = "requests with keys and values of %s, which differed and stays in service: %s; later requests have them, too"
"""The log's sentence after a finding without a ban."""


class Verdict(enum.Enum):
    """What happens to a request after a step."""

    GOES_ON = enum.auto()
    AGAIN = enum.auto()  # its keys and values leave the cache and are computed again, with each call checked
    ENDS = enum.auto()


class StepReport(NamedTuple):
    """A worker's report to the scheduler about a step.

    Args:
        origins: the calls where numbers stopped being finite, at most one per rank; ``None`` if calls were not checked.
        wrong: implementations that were banned because their results were wrong.
        kept: implementations with results that differed for the first time, which stay in service.
    """

    origins: tuple[Origin, ...] | None = None
    wrong: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Verdicts:
    """The damaged requests of one scheduler.

    Args:
        action: the setting ``damaged_requests``.

    Attributes:
        watched: requests that are computed again with each call checked.
    """

    def __init__(self, action: str) -> None:
        self.action = action
        self.watched: set[str] = set()

    def of(self, request: str, damaged: bool, watched: bool, sampled: bool) -> Verdict:
        """Return the verdict on a request after a step that included it.

        Args:
            request: its id.
            damaged: whether its logits have NaN or infinity.
            watched: whether each call of the step was checked.
            sampled: whether the step gave it a token.
        """
        if request not in self.watched:
            if not damaged:
                return Verdict.GOES_ON
            self.watched.add(request)
            return Verdict.AGAIN
        if not watched or not (damaged or sampled):
            return Verdict.GOES_ON
        self.watched.discard(request)
        return Verdict.ENDS if damaged or self.action == "end" else Verdict.GOES_ON


class Wrong:
    """Implementations that shadow mode has found to be wrong since the last call of a method.

    Args:
        findings: the findings of the process's manager.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings, self.reported, self.seen = findings, 0, 0
        self.named: set[str] = set()

    def new(self) -> tuple[str, ...]:
        """Return all banned implementations as text if there are more than last time, else nothing."""
        banned, before = self.findings.banned, self.reported
        self.reported = len(banned)
        return tuple(dict.fromkeys(f"'{op}' by '{impl}'" for op, impl, _ in banned)) if len(banned) > before else ()

    def kept(self) -> tuple[str, ...]:
        """Return implementations that differed for the first time and were not banned, as text."""
        found, before = self.findings.found(), self.seen
        self.seen = len(found)
        if self.seen == before:
            return ()
        differed = {f"'{one.op_name}' by '{one.impl_id}'" for one in found}
        new = differed - self.named - {f"'{op}' by '{impl}'" for op, impl, _ in self.findings.banned}
        self.named |= new
        return tuple(sorted(new))


def of_numbers(damaged: bool, origins: Sequence[Origin] | None) -> str:
    """Return why a request with NaN or infinity in its logits ends; ``damaged``: they recurred after recomputing."""
    if not damaged:
        return "its logits had NaN or infinity, which did not come again when it was computed once more"
    if origins is None:
        return "its logits have NaN or infinity"
    where = f"in {' and '.join(map(str, origins))}" if origins else "outside fl_dispatch"
    return f"its logits have NaN or infinity: they began {where}"


def of_wrong(implementations: Iterable[str]) -> str:
    """Return why a request ends if it ran while an implementation was found to be wrong."""
    return f"its keys and values may be wrong, because these results were: {'; '.join(implementations)}"
