"""A manager's knowledge, and the decision that follows from it.

The parts below decide nothing by themselves, and the parts above keep no knowledge of their own: a table entry, the
recovery of a failed call and the manager share one :class:`State`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .devices import detect_device
from .errors import NoImplementationError
from .fixed_choices import Choice, Choices, FixedChoices, Place
from .knowledge.availability import Availability
from .knowledge.counting import CallCounter
from .knowledge.failures import FailureLog
from .knowledge.proofs import Proofs
from .knowledge.traces import Traces
from .locking import writers
from .logger_manager import get_logger
from .ops import Operator
from .registry import OpRegistry
from .selection.decision import Branch, Decision, select
from .settings.names import suggestion
from .settings.selection_policy import SelectionPolicy
from .types import OpImpl

logger = get_logger(__name__)
Function = Callable[..., Any]
Wrapper = Callable[[OpImpl, Decision, str | None, Function], Function]
"""Wraps an implementation's function, given its decision and layer; returns the function for the table."""


class State:
    """The knowledge of one manager.

    Args:
        registry: the implementations.
        changed: rebuilds the tables for some operators, or for all (``None``).
        view: an operator and a scope → the opaque view that compiled code calls; ``None`` without views.

    Attributes:
        failures: the bans.
        proofs: which implementations have succeeded.
        traces: which implementations Dynamo can trace.
        availability: which implementations can run here, each asked once.
        counter: calls by implementation, while counting is on.
        wrapper: wraps implementations in the tables; ``None`` without a wrapper.
        facts: the host's facts about the process.
        scopes: operator → the scopes that it was bound for.
        fixed: the implementation of every operator and layer while dispatch is frozen.
        whole: operators that compiled code calls by their views even if it could trace them, because a host looks for
            these calls in its graphs.
        lockstep: set by a host if its ranks run in step; a fallback then aborts the step instead of diverging.
    """

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
        self.wrapper: Wrapper | None = None
        self.facts: Mapping[str, Any] = {}
        self.scopes: dict[str, set[str]] = {}
        self.whole: frozenset[str] = frozenset()
        self.lockstep = False
        self.fixed = FixedChoices(self._choices_at)

    # ---- deciding

    def decide(
        self, op_name: str, scope: str | None, policy: SelectionPolicy, *, bans: bool = True, facts: bool = True
    ) -> Decision:
        """Rank an operator's implementations under a policy, with or without the bans and the facts that hosts stated.

        Raises:
            NoImplementationError: no backend registered the operator.
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
            notes={impl: f"opaque in compiled code: {why}" for impl, why in self.traces.untraceable().items()},
        )

    def reachable(self, decision: Decision, branch: Branch, bans: bool = True) -> list[OpImpl]:
        """Return a branch's candidates up to the first one that takes every call."""
        runs = []
        for impl in branch.candidates:
            runs.append(impl)
            if self.takes_every_call(decision, impl, bans):
                break
        return runs

    def takes_every_call(self, decision: Decision, impl: OpImpl, bans: bool = True) -> bool:
        """Whether an implementation takes every call: its device, no predicate, no ban, no omitted parameter."""
        convention = self.registry.convention(impl)
        banned = bans and self.failures.kinds(impl, decision.scope)
        whole = impl.supports is None and not (convention and convention.left_out)
        return whole and not banned and not is_elsewhere(impl)

    def choices(self, decision: Decision, bans: bool = True) -> Choices:
        """Reduce a decision to the implementations that run, for comparison."""
        found = []
        for branch in decision.branches:
            runs = self.reachable(decision, branch, bans)
            kinds = {(impl.impl_id, kind) for impl in runs for kind in self.failures.kinds(impl, decision.scope)}
            complete = bool(runs) and self.takes_every_call(decision, runs[-1], bans)
            found.append(Choice(branch.rule, tuple(runs), frozenset(kinds if bans else ()), complete))
        return tuple(found)

    def _choices_at(self, place: Place, policy: SelectionPolicy, bans: bool) -> Choices:
        """Return a policy's choices for an operator or layer; empty if no backend registered the operator."""
        op_name, scope = place
        if not self.registry.get_implementations(op_name):
            return ()
        return self.choices(self.decide(op_name, scope, policy, bans=bans), bans)

    @property
    def frozen(self) -> bool:
        """Whether dispatch is frozen."""
        return self.fixed.on

    # ---- what calls teach

    def prove(self, impl: OpImpl, *, wrote: bool) -> None:
        """Record that an implementation succeeded; ``wrote`` if it was free to overwrite arguments."""
        if self.proofs.holds(impl, wrote=wrote):
            return
        with writers:
            first = self.proofs.add(impl, wrote=wrote)
            self.changed({impl.op_name})
        if first:
            logger.info("Op '%s' using %s", impl.op_name, impl)

    def watch(self, impl: OpImpl) -> None:
        """Keep copies of what an implementation overwrites from now on, because it failed after a success."""
        with writers:
            self.proofs.watch(impl)
            self.changed({impl.op_name})


def is_elsewhere(impl: OpImpl) -> bool:
    """Whether an implementation does not take tensors of this machine's device, so that each call is checked."""
    return impl.device_types is not None and not impl.takes_device(detect_device().torch_type)


def unknown(op_name: str) -> NoImplementationError:
    """Return the error for an operator without an implementation."""
    return NoImplementationError(op_name, [f"no backend registered an operator '{op_name}'{suggestion(op_name)}"])
