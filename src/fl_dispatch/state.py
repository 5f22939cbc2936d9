"""A manager's knowledge, the decision that follows from it, and the part that is fixed while dispatch is frozen.

The parts below decide nothing by themselves, and the parts above keep no knowledge of their own: a table entry, the
recovery of a failed call and the manager share one :class:`State`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .devices import detect_device
from .errors import DispatchFrozenError, NoImplementationError
from .knowledge.availability import Availability
from .knowledge.counting import CallCounter
from .knowledge.failures import ArgumentKind, FailureLog
from .knowledge.findings import Findings
from .knowledge.proofs import Proofs
from .knowledge.sampling import Sampling
from .knowledge.traces import Traces
from .locking import writers
from .logger_manager import get_logger
from .ops import Operator
from .registry import OpRegistry
from .selection.decision import Branch, Decision, condition_of, select
from .settings import TunedRule
from .settings.names import suggestion
from .settings.selection_policy import SelectionPolicy
from .types import OpImpl

logger = get_logger(__name__)


@dataclass(frozen=True)
class Choice:
    """The implementations that run for the calls that a rule admits.

    Args:
        rule: the condition; ``None`` for all other calls.
        runs: the implementation that runs, after those that may decline some of these calls.
        banned: kinds of arguments for which an implementation of ``runs`` is left out, by its id.
        complete: the last of ``runs`` takes every call that reaches it.
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
        """The same as plain data."""
        data: dict[str, Any] = {"runs": [impl.impl_id for impl in self.runs]}
        if self.rule is not None:
            data["when"] = condition_of(self.rule)
        if self.banned:
            data["not for"] = sorted(f"{impl_id}: {kind}" for impl_id, kind in self.banned)
        return data


Choices = tuple[Choice, ...]
Place = tuple[str, str | None]
"""An operator, and the layer that it is decided for."""


class State:
    """The knowledge of one manager.

    Args:
        registry: the implementations.
        changed: rebuilds what calls read, for some operators or for all (``None``).
        view: an operator and a scope → what compiled code calls; ``None`` where there are no opaque views.

    Attributes:
        failures: the bans.
        proofs: which implementations have succeeded.
        traces: which implementations Dynamo can trace.
        availability: which implementations can run here, each asked once.
        counter: calls by implementation, while counting is on.
        sampling: which calls shadow mode compares; ``None`` while it is off.
        findings: what shadow mode has found.
        facts: what the host stated about the process.
        scopes: operator → the scopes that it was bound for.
        fixed: what every operator and layer runs while dispatch is frozen; ``None`` while it is not.
        lockstep: set by a host whose ranks run in step; a fallback then aborts the step instead of diverging.
    """

    KEPT_ANSWERS = 64  # policies of which it is remembered whether they change a fixed choice

    def __init__(
        self,
        registry: OpRegistry,
        changed: Callable[[Iterable[str] | None], None],
        view: Callable[[Operator, str], Callable[..., Any]] | None = None,
    ) -> None:
        self.registry, self.changed, self.view = registry, changed, view
        self.failures = FailureLog()
        self.proofs = Proofs()
        self.traces = Traces()
        self.availability = Availability()
        self.counter = CallCounter()
        self.sampling: Sampling | None = None
        self.findings = Findings()
        self.facts: Mapping[str, Any] = {}
        self.scopes: dict[str, set[str]] = {}
        self.lockstep = False
        self.fixed: dict[Place, Choices] | None = None
        self._differences: dict[tuple[SelectionPolicy, bool], list[str]] = {}

    # ---- deciding

    def decide(
        self, op_name: str, scope: str | None, policy: SelectionPolicy, *, bans: bool = True, facts: bool = True
    ) -> Decision:
        """Rank an operator's implementations under a policy, with or without the bans and the facts that hosts stated.

        Raises:
            NoImplementationError: nobody registered the operator.
        """
        impls = self.registry.get_implementations(op_name)
        if not impls:
            raise unknown(op_name)
        return select(
            op_name,
            impls,
            policy,
            scope=scope,
            available=self.availability.of,
            banned=self.failures.as_a_whole if bans else lambda impl: "",
            facts=self.facts if facts else {},
            untraceable=self.traces.untraceable(),
        )

    def who_may_run(self, decision: Decision, branch: Branch, bans: bool = True) -> list[OpImpl]:
        """A branch's candidates up to the first one that takes every call."""
        runs = []
        for impl in branch.candidates:
            runs.append(impl)
            if self.takes_every_call(decision, impl, bans):
                break
        return runs

    def takes_every_call(self, decision: Decision, impl: OpImpl, bans: bool = True) -> bool:
        """Whether an implementation takes every call here: its device, no predicate, no ban, no parameter left out."""
        convention = self.registry.convention(impl)
        banned = bans and self.failures.kinds(impl, decision.scope)
        whole = impl.supports is None and not (convention and convention.left_out)
        return whole and not banned and not is_elsewhere(impl)

    # ---- what calls teach

    def prove(self, impl: OpImpl, *, wrote: bool) -> None:
        """An implementation succeeded; ``wrote`` when it was free to overwrite arguments."""
        if self.proofs.holds(impl, wrote=wrote):
            return
        with writers:
            first = self.proofs.add(impl, wrote=wrote)
            self.changed({impl.op_name})
        if first:
            logger.info("Op '%s' using %s", impl.op_name, impl)

    def watch(self, impl: OpImpl) -> None:
        """Keep copies of what an implementation overwrites from now on: it failed after it had been proven."""
        with writers:
            self.proofs.watch(impl)
            self.changed({impl.op_name})

    # ---- what is fixed

    @property
    def frozen(self) -> bool:
        """Whether dispatch is frozen."""
        return self.fixed is not None

    def fix(self, decided: Mapping[Place, Decision] | None) -> None:
        """Fix what these decisions choose, and nothing else; ``None`` fixes nothing any more."""
        self.fixed = None if decided is None else {place: self.choices(found) for place, found in decided.items()}
        self._differences = {}

    def fix_one(self, place: Place, decision: Decision) -> Choices:
        """The choices that are fixed for an operator or layer; one that came after the freeze is fixed now."""
        assert self.fixed is not None
        if place not in self.fixed:
            self.fixed[place] = self.choices(decision)
            self._differences = {}  # a policy that was admitted may differ here
        return self.fixed[place]

    def choices(self, decision: Decision, bans: bool = True) -> Choices:
        """A decision reduced to the implementations that run, for comparison."""
        found = []
        for branch in decision.branches:
            runs = self.who_may_run(decision, branch, bans)
            kinds = {(impl.impl_id, kind) for impl in runs for kind in self.failures.kinds(impl, decision.scope)}
            complete = bool(runs) and self.takes_every_call(decision, runs[-1], bans)
            found.append(Choice(branch.rule, tuple(runs), frozenset(kinds if bans else ()), complete))
        return tuple(found)

    def check(
        self, change: str, policies: Iterable[SelectionPolicy], *, bans: bool = True, only: str | None = None
    ) -> None:
        """Whether everything fixed would be decided the same after a change that is in place already.

        Args:
            change: what changed, for the message.
            policies: those in use; one that differs already runs what is fixed, and is passed over.
            bans: whether bans count.
            only: the one operator that it may concern; all by default.

        Raises:
            DispatchFrozenError: it would not.
        """
        if self.fixed is None:
            return
        for policy in dict.fromkeys(policies):
            if self._differences.get((policy, True)) or self._differences.get((policy, False)):
                continue
            different = self._different(policy, bans, only)
            if different:
                raise DispatchFrozenError(change, different)
        self._differences = {key: found for key, found in self._differences.items() if not found}

    def admits(self, policy: SelectionPolicy, *, bans: bool = True) -> bool:
        """Whether a policy makes the choices that are fixed."""
        return self.fixed is None or not self._remembered(policy, bans)

    def admit(self, change: str, policy: SelectionPolicy, *, bans: bool) -> None:
        """The same; raises :class:`DispatchFrozenError` if it does not."""
        if not self.admits(policy, bans=bans):
            raise DispatchFrozenError(change, self._remembered(policy, bans))

    def _remembered(self, policy: SelectionPolicy, bans: bool) -> list[str]:
        found = self._differences.get((policy, bans))
        if found is None:
            with writers:
                while len(self._differences) >= self.KEPT_ANSWERS:
                    del self._differences[next(iter(self._differences))]
                found = self._differences[policy, bans] = self._different(policy, bans)
        return found

    def _different(self, policy: SelectionPolicy, bans: bool, only: str | None = None) -> list[str]:
        different = []
        for (op_name, scope), before in (self.fixed or {}).items():
            if only not in (None, op_name):
                continue
            impls = self.registry.get_implementations(op_name)
            now = self.choices(self.decide(op_name, scope, policy, bans=bans), bans) if impls else ()
            if now != before:
                where = f"{op_name}@{scope}" if scope else op_name
                different.append(f"{where}: {in_one_line(data(before))} would become {in_one_line(data(now))}")
        return different


def is_elsewhere(impl: OpImpl) -> bool:
    """Whether tensors of this machine's device are not for it, so that each call has to be looked at."""
    return impl.device_types is not None and not impl.takes_device(detect_device().torch_type)


def data(choices: Choices) -> list[dict[str, Any]]:
    """Choices as plain data."""
    return [choice.as_data() for choice in choices]


def in_one_line(value: Any) -> str:
    """Choices as plain data, or a version, in one line."""
    if not value:
        return "nothing"
    if isinstance(value, str):
        return value
    if len(value) == 1 and set(value[0]) == {"runs"}:
        return ", else ".join(value[0]["runs"]) or "nothing"
    return json.dumps(value, sort_keys=True)


def unknown(op_name: str) -> NoImplementationError:
    """The error for an operator that nobody registered."""
    return NoImplementationError(op_name, [f"nobody registered an operator '{op_name}'{suggestion(op_name)}"])
