"""Run a drawn live call through a second implementation, too, and compare the results.

The caller always gets the first implementation's result. The second run comes later, on copies of whatever the first
one may overwrite, so it changes nothing. The tables contain none of this unless the user asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import WrongResultError, text_of
from ..knowledge.error_kinds import is_capturing
from ..locking import writers
from ..logger_manager import get_logger
from ..ops import Access, Operator
from ..run.arguments import Call
from ..run.recovery import why_not_for_call
from ..run.table import MADE_FROM
from ..selection.decision import Decision
from ..signatures import Convention
from ..state import State
from ..types import BackendImplKind, OpImpl
from .calls import call_of, declared
from .difference import Difference, difference
from .findings import Findings
from .sampling import Sampling

logger = get_logger(__name__)

ACCEPTED = 2.0
"""Tolerances by which two implementations may differ, because each may be off by one."""


class Shadow:
    """Shadow mode of one manager.

    Attributes:
        sampling: the selection of calls to compare; ``None`` while shadow mode is off.
        findings: its findings.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._sampling: Sampling | None = None
        self.findings = Findings()

    @property
    def sampling(self) -> Sampling | None:
        """Return the selection of calls to compare. Entries that are made later follow a change."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling | None) -> None:
        wrapper = None if sampling is None else partial(_watched, self._state, sampling, self.findings)
        with writers:
            self._sampling, self._state.wrapper = sampling, wrapper


def _watched(
    state: State,
    sampling: Sampling,
    findings: Findings,
    impl: OpImpl,
    decision: Decision,
    scope: str | None,
    fn: Callable[..., Any],
) -> Callable[..., Any]:
    """Return what stands in the table for an implementation, see :attr:`fl_dispatch.state.State.wrapper`."""
    if (known := declared(state, impl)) is None:
        return fn
    operator, convention = known
    if not sampling.wants(impl.op_name) or sampling.is_second(impl):
        return fn
    watch = _Watch(state, sampling, findings, impl, decision, scope, fn, operator, convention)
    gaps = sampling.gaps(f"{impl.op_name}@{scope or ''}")
    left = next(gaps)
    compiling = torch.compiler.is_dynamo_compiling

    def shadowed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if compiling():
            return fn(*args, **kwargs)
        left -= 1
        if left > 0 and not sampling.every_call:
            return fn(*args, **kwargs)
        if left <= 0:
            left = next(gaps)
        if not sampling.affordable() or is_capturing():
            return fn(*args, **kwargs)
        return watch.compared(args, kwargs)

    shadowed.__dict__[MADE_FROM] = decision
    return shadowed


@dataclass(frozen=True)
class _Watch:
    """The comparison of one implementation's drawn calls; the arguments are those of :func:`_watched`."""

    state: State
    sampling: Sampling
    findings: Findings
    impl: OpImpl
    decision: Decision
    scope: str | None
    fn: Callable[..., Any]
    operator: Operator
    convention: Convention

    def compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the implementation as usual, and then the second one on copies of the original arguments."""
        call = copy = None
        with self.sampling.working():
            try:
                call = call_of(self.operator, self.convention, self.scope, args, kwargs)
                second = self._second(call)
                copy = _second_call(self.operator, call) if second is not None else None
            except Exception as error:  # the caller's call must run whatever fails here
                self._unfit(text_of(error))
        result = self.fn(*args, **kwargs)
        if call is None or copy is None or second is None:
            return result
        with self.sampling.working():
            try:
                other = copy.run(second.fn, self.state.registry.convention(second))
                with torch.no_grad():
                    found = difference(self.operator, call, result, copy, other)
                self.findings.compared(self.impl)
                if not found.tolerances <= ACCEPTED:
                    self._report(second, call, found)
            except Exception as error:  # an error of the second implementation, or too little memory for copies
                self._unfit(text_of(error))
        return result

    def _second(self, call: Call) -> OpImpl | None:
        """Return the implementation to compare with, if one takes the call."""
        reasons = []
        for other in self.state.registry.get_implementations(self.impl.op_name):
            if other is self.impl or not self.sampling.is_second(other):
                continue
            available, why = self.state.availability.of(other)
            reason = ("" if available else why) or why_not_for_call(self.state, other, call)
            if not reason:
                return other
            reasons.append(f"{other.impl_id}: {reason}")
        self._unfit("; ".join(reasons) or f"no implementation is '{self.sampling.options.second}'")
        return None

    def _unfit(self, reason: str) -> None:
        """Log once why an operator's calls, or one of them, cannot be compared."""
        op_name, impl_id = self.impl.op_name, self.impl.impl_id
        self.findings.unfit[op_name] = reason
        if self.state.failures.is_new_problem(self.impl, "shadow"):
            logger.warning("shadow: calls of '%s' by '%s' are not all compared: %s", op_name, impl_id, reason)

    def _report(self, second: OpImpl, call: Call, found: Difference) -> None:
        """Record a difference; the first one of a kind logs a WARNING, and may lead to a ban."""
        impl, findings = self.impl, self.findings
        known = findings.known(impl, call.kind)
        text = f"differs from '{second.impl_id}': {found.where}"
        why_not = self._why_no_ban(second, call)  # asked each time, because a policy change lifts bans
        if not why_not:
            self.state.failures.record(impl, call.kind, WrongResultError(text))
            findings.ban(impl, call.kind)
            self.state.changed({impl.op_name})
        outcome = f"it goes on, because {why_not}" if why_not else "it is banned for these arguments"
        findings.add(impl, second, call.kind, found.tolerances, found.where, outcome)
        if known is None:
            logger.warning("shadow: '%s' by '%s' %s (%s); %s", impl.op_name, impl.impl_id, text, call.kind, outcome)

    def _why_no_ban(self, second: OpImpl, call: Call) -> str:
        """Return why a wrong implementation stays in service; empty if a ban is wanted and safe."""
        if not self.sampling.options.ban:
            return "shadow_action is 'log'"
        if second.kind is not BackendImplKind.REFERENCE:
            return "only the reference says which of the two is wrong"
        if self.state.frozen:
            return "compiled code or a captured graph holds this choice"
        if self.state.lockstep or _several_ranks():
            return "ranks run in step and this one alone must not choose anew"
        others = [other for other in call.branch(self.decision).candidates if other is not self.impl]
        if all(why_not_for_call(self.state, other, call) for other in others):
            return "the policy leaves no other implementation for these arguments"
        return ""


def _second_call(operator: Operator, call: Call) -> Call:
    """Return a copy of a call with its own memory for everything that it may write."""
    values = call.values
    written = operator.written(call.args)
    if any(access is Access.STATE for access, _ in written.values()):
        if operator.small_state is None:
            raise NotImplementedError("it writes a state that is too large to copy, and declares no small one")
        small = operator.second_operands(call.args)
        values |= dict(zip(operator.parameters, small, strict=False))
    else:
        with torch.no_grad():  # rows that a call leaves alone must be equal in both runs, so outputs are copied too
            values |= {name: tensor.clone() for name, (_, tensor) in written.items()}
    return Call(operator.name, call.scope, (), values, call.layer)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
