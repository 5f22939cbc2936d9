"""Choices that are fixed while dispatch is frozen, and the check whether a change would alter one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import DispatchFrozenError
from .knowledge.failures import ArgumentKind
from .locking import writers
from .selection.decision import condition_of
from .settings.selection_policy import SelectionPolicy, TunedRule
from .types import OpImpl


@dataclass(frozen=True)
class Choice:
    """The implementations that run for the calls that a rule admits.

    Args:
        rule: the condition; ``None`` for all other calls.
        runs: the implementation that runs, preceded by those that may decline some of these calls.
        banned: kinds of arguments for which an implementation of ``runs`` is left out, by its id.
        complete: whether the last of ``runs`` takes every call that reaches it.
    """

    rule: TunedRule | None
    runs: tuple[OpImpl, ...]
    banned: frozenset[tuple[str, ArgumentKind]] = frozenset()
    complete: bool = True

    @property
    def sole(self) -> bool:
        """Whether one implementation takes every call, whatever its arguments."""
        return self.rule is None and len(self.runs) == 1 and self.complete

    def as_data(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        data: dict[str, Any] = {"runs": [impl.impl_id for impl in self.runs]}
        if self.rule is not None:
            data["when"] = condition_of(self.rule)
        if self.banned:
            data["not for"] = sorted(f"{impl_id}: {kind}" for impl_id, kind in self.banned)
        return data


Choices = tuple[Choice, ...]
Place = tuple[str, str | None]
"""An operator, and the layer that it is decided for."""


class FixedChoices:
    """The choices of one manager that no change may alter while dispatch is frozen.

    Args:
        choices_at: place, policy, and whether bans count → the implementations that would run there now.
    """

    KEPT_ANSWERS = 64  # policy → whether it alters a fixed choice, once that was asked

    def __init__(self, choices_at: Callable[[Place, SelectionPolicy, bool], Choices]) -> None:
        self._choices_at = choices_at
        self._fixed: dict[Place, Choices] | None = None
        self._differences: dict[tuple[SelectionPolicy, bool], list[str]] = {}

    @property
    def on(self) -> bool:
        """Whether dispatch is frozen."""
        return self._fixed is not None

    def fix(self, choices: Mapping[Place, Choices] | None) -> None:
        """Fix exactly these choices; ``None`` lifts all."""
        self._fixed = None if choices is None else dict(choices)
        self._differences = {}

    def add(self, place: Place, choices: Callable[[], Choices]) -> Choices:
        """Return the choices that are fixed at a place; fix these if the place came after the freeze."""
        assert self._fixed is not None
        if place not in self._fixed:
            self._fixed[place] = choices()
            self._differences = {}  # a policy that was admitted may differ at this place
        return self._fixed[place]

    def require_unchanged(
        self, change: str, policies: Iterable[SelectionPolicy], *, bans: bool = True, only: str | None = None
    ) -> None:
        """Refuse a change, already made by the caller, if it alters a fixed choice.

        Args:
            change: what changed, for the message.
            policies: the policies in use; one that already differs runs the fixed choices, and is skipped.
            bans: whether bans count.
            only: the only operator that the change may concern; all by default.

        Raises:
            DispatchFrozenError: the change alters a fixed choice.
        """
        for policy in dict.fromkeys(policies):
            if self._differences.get((policy, True)) or self._differences.get((policy, False)):
                continue
            different = self._different(policy, bans, only)
            if different:
                raise DispatchFrozenError(change, different)
        self._differences = {key: found for key, found in self._differences.items() if not found}

    def allows(self, policy: SelectionPolicy) -> bool:
        """Whether a policy makes the choices that are fixed, bans included."""
        return not self._remembered(policy, True)

    def require_allowed(self, change: str, policy: SelectionPolicy, *, bans: bool) -> None:
        """Refuse a policy that makes other choices.

        Raises:
            DispatchFrozenError: the policy makes other choices.
        """
        if different := self._remembered(policy, bans):
            raise DispatchFrozenError(change, different)

    def _remembered(self, policy: SelectionPolicy, bans: bool) -> list[str]:
        if self._fixed is None:
            return []
        found = self._differences.get((policy, bans))
        if found is None:
            with writers:
                while len(self._differences) >= self.KEPT_ANSWERS:
                    del self._differences[next(iter(self._differences))]
                found = self._differences[policy, bans] = self._different(policy, bans)
        return found

    def _different(self, policy: SelectionPolicy, bans: bool, only: str | None = None) -> list[str]:
        different = []
        for (op_name, scope), before in (self._fixed or {}).items():
            if only not in (None, op_name):
                continue
            now = self._choices_at((op_name, scope), policy, bans)
            if now != before:
                where = f"{op_name}@{scope}" if scope else op_name
                different.append(f"{where}: {in_one_line(data(before))} would become {in_one_line(data(now))}")
        return different


def data(choices: Choices) -> list[dict[str, Any]]:
    """Return choices as plain data."""
    return [choice.as_data() for choice in choices]


def in_one_line(value: Any) -> str:
    """Return choices as plain data, or a version, in one line."""
    if not value:
        return "nothing"
    if isinstance(value, str):
        return value
    if len(value) == 1 and set(value[0]) == {"runs"}:
        return ", else ".join(value[0]["runs"]) or "nothing"
    return json.dumps(value, sort_keys=True)
