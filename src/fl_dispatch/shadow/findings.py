"""Findings of shadow mode: implementations that disagreed with another one in live calls, by kind of arguments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..knowledge.failures import ArgumentKind
from ..locking import writers
from ..logger_manager import get_logger
from ..types import OpImpl
from .origin import Origin

logger = get_logger(__name__)

Pair = tuple[str, str]
"""An operator, and the id of an implementation."""


@dataclass(frozen=True)
class Finding:
    """One implementation with wrong results for one kind of arguments.

    Args:
        op_name, impl_id: the operator and the implementation.
        second: the id of the implementation used for comparison.
        kind: the arguments' dtype, rank, layout, device and layer.
        calls: the number of calls that differed.
        worst: the largest difference, in tolerances; NaN if one of the two is not a number.
        example: place and size of the first difference.
        outcome: the consequence of the finding, such as a ban.
        first, last: seconds since the epoch.
    """

    op_name: str
    impl_id: str
    second: str
    kind: ArgumentKind
    calls: int
    worst: float
    example: str
    outcome: str
    first: float
    last: float

    def as_data(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "operator": self.op_name,
            "implementation": self.impl_id,
            "second": self.second,
            "dtype": str(self.kind.dtype).removeprefix("torch."),
            "rank": self.kind.rank,
            "layer": self.kind.scope or "",
            "kind": str(self.kind),
            "calls": self.calls,
            "worst": self.worst if self.worst == self.worst else None,
            "example": self.example,
            "outcome": self.outcome,
            "first": self.first,
            "last": self.last,
        }


class Findings:
    """Calls that shadow mode compared in one manager, and its findings.

    Attributes:
        banned: operator, implementation and kind of arguments of the bans that came from a finding.
        unfit: operator → why a second run was not possible.
        origins: first call with NaN or infinity → how often it damaged requests.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, ArgumentKind], Finding] = {}
        self._compared: dict[Pair, int] = {}
        self.banned: frozenset[tuple[str, str, ArgumentKind]] = frozenset()
        self.unfit: dict[str, str] = {}
        self.origins: Counter[Origin] = Counter()

    def compared(self, impl: OpImpl) -> None:
        """Count one more compared call of an implementation."""
        with writers:
            pair = impl.op_name, impl.impl_id
            self._compared[pair] = self._compared.get(pair, 0) + 1

    def begun(self, origins: Iterable[Origin]) -> None:
        """Count the calls where numbers stopped being finite in a step."""
        for origin in origins:
            logger.error("numbers stopped being finite in %s", origin)
            self.origins[origin] += 1

    def known(self, impl: OpImpl, kind: ArgumentKind) -> Finding | None:
        """Return the finding about an implementation and this kind of arguments, if any."""
        return self._found.get((impl.op_name, impl.impl_id, kind))

    def add(self, impl: OpImpl, second: OpImpl, kind: ArgumentKind, worst: float, example: str, outcome: str) -> None:
        """Record a call that differed; keep the first example of a kind, and the last outcome."""
        now, key = time.time(), (impl.op_name, impl.impl_id, kind)
        with writers:
            before = self._found.get(key)
            if before is None:
                found = Finding(*key[:2], second.impl_id, kind, 1, worst, example, outcome, now, now)
            else:
                largest = worst if not worst <= before.worst else before.worst
                found = replace(
                    before, second=second.impl_id, calls=before.calls + 1, worst=largest, outcome=outcome, last=now
                )
            self._found = {**self._found, key: found}

    def ban(self, impl: OpImpl, kind: ArgumentKind) -> None:
        """Record a ban that came from a finding."""
        with writers:
            self.banned |= {(impl.op_name, impl.impl_id, kind)}

    def found(self) -> Collection[Finding]:
        """Return the findings, in the order of their first calls."""
        return self._found.values()

    def compared_calls(self) -> dict[Pair, int]:
        """Return the number of compared calls by operator and implementation."""
        with writers:
            return dict(self._compared)
