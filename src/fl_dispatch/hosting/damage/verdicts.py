"""The decision what becomes of damaged requests, made once for all ranks, where a host schedules."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...shadow.findings import Findings
from ...shadow.origin import Origin


class Verdict(enum.Enum):
    """What becomes of a request after a step."""

    GOES_ON = enum.auto()
    AGAIN = enum.auto()  # its keys and values leave the cache, and are computed again while each call is looked at
    ENDS = enum.auto()


class Told(NamedTuple):
    """What a worker tells the scheduler of a step.

    Args:
        origins: the calls where numbers stopped being finite, one a rank at most; ``None`` if they were not looked for.
        wrong: implementations that were taken out of service because their results were wrong.
    """

    origins: tuple[Origin, ...] | None = None
    wrong: tuple[str, ...] = ()


class Verdicts:
    """The damaged requests of one scheduler.

    Args:
        action: the setting ``damaged_requests``.

    Attributes:
        watched: requests that are computed again while each call is looked at.
    """

    def __init__(self, action: str) -> None:
        self.action = action
        self.watched: set[str] = set()

    def of(self, request: str, damaged: bool, watched: bool, sampled: bool) -> Verdict:
        """The verdict on a request after a step that it was part of.

        Args:
            request: its id.
            damaged: its logits have NaN or infinity.
            watched: each call of the step was looked at.
            sampled: the step gave it a token.
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
    """Implementations that shadow mode has taken out of service, as often as it is asked.

    Args:
        findings: of the process's manager.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings, self.told = findings, 0

    def new(self) -> tuple[str, ...]:
        """All of them in words if there are more than last time, else nothing."""
        banned, before = self.findings.banned, self.told
        self.told = len(banned)
        return tuple(dict.fromkeys(f"'{op}' by '{impl}'" for op, impl, _ in banned)) if len(banned) > before else ()


def of_numbers(damaged: bool, origins: Sequence[Origin] | None) -> str:
    """Why a request ends that had NaN or infinity in its logits; ``damaged``: it has them again."""
    if not damaged:
        return "its logits had NaN or infinity, which did not come again when it was computed once more"
    if origins is None:
        return "its logits have NaN or infinity"
    where = f"in {' and '.join(map(str, origins))}" if origins else "outside fl_dispatch"
    return f"its logits have NaN or infinity: they began {where}"


def of_wrong(implementations: Iterable[str]) -> str:
    """Why a request ends that ran when an implementation was found to be wrong."""
    return f"its keys and values may be wrong, because these results were: {'; '.join(implementations)}"
