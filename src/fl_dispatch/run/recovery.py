"""Recovery after an exception, and the careful path.

Three rules decide. *Never a wrong answer*: the next implementation runs on the original arguments, or the call raises.
*The input may be guilty*: if every candidate fails, none is banned. *A dead device stays dead*: nothing is retried
after an error that kills the device context, nor inside a graph capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import BrokenPromiseError, NoImplementationError, NotSupported, RankDivergenceError, text_of
from ..knowledge.error_kinds import add_note, declines, is_capturing, is_dead_device, is_out_of_memory
from ..logger_manager import get_logger
from ..ops.results import broken_promise
from ..selection.decision import Decision
from ..settings.selection_policy import SelectionPolicy
from ..state import State
from ..types import OpImpl
from .arguments import Call
from .snapshot import copies_of, put_back
from .table import MADE_FROM, DispatchTable, Plan

logger = get_logger(__name__)
_is_compiling = torch.compiler.is_dynamo_compiling


class FinalError(Exception):
    """Carries a final error out of a table entry, past the caller's recovery."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class LaterError(Exception):
    """An error of a candidate after the first, on its way out of a table entry."""

    def __init__(self, error: Exception, impl: OpImpl) -> None:
        self.error, self.impl = error, impl


def must_raise(state: State, error: BaseException, policy: SelectionPolicy) -> bool:
    """Whether an implementation's error goes to the caller unchanged."""
    if policy.strict or state.frozen:
        return True
    return is_out_of_memory(error) or is_dead_device(error) or is_capturing()


def run(state: State, policy: SelectionPolicy, decision: Decision, call: Call) -> Any:
    """Run the first candidate that fits, with the checks of a first call; fall back where that is safe.

    Raises:
        NoImplementationError: no candidate fits the arguments; the message says why for each.
    """
    return _Attempts(state, policy, decision, call).run(call.branch(decision).candidates)


def recover(
    key: str,
    table: DispatchTable,
    fn: Callable[..., Any],
    error: Exception,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Recover after a table's function raised on the fast path, which keeps no copies of its arguments."""
    if _is_compiling():  # raised in a trace: the next one is traced if nothing was written for certain
        if isinstance(error, NotSupported):
            return table.plans[key].declined(*args, **kwargs)
        raise error
    call: Call | None = None
    failed: OpImpl | None = None
    try:
        if type(error) is FinalError:
            raise error.error
        if isinstance(error, LaterError):
            failed, error = error.impl, error.error
        plan = table.plans.get(key)
        if plan is None:
            raise error  # the operator was removed during the call: no candidate is left
        try:
            call = Call.of(plan.op_name, plan.scope, args, kwargs)
        except TypeError as misfit:  # the arguments do not fit the operator: the caller's mistake
            if str(misfit) != str(error):
                add_note(error, f"fl_dispatch: {misfit}")
            raise error from None
        decision = plan.decision if plan.entry is fn else getattr(fn, MADE_FROM, None)
        if failed is None:
            failed = _bare(table.state, fn, plan) if decision is None else call.branch(decision).candidates[0]
        return _after_fast_path(table.state, table.policy, decision or plan.decision, call, failed, error)
    finally:
        del error, call, args, kwargs


def _bare(state: State, fn: Callable[..., Any], plan: Plan) -> OpImpl:
    """Return the implementation that was the bare entry until the entry was replaced during the call."""
    impls = state.registry.get_implementations(plan.op_name)
    return next((impl for impl in impls if state.counter.is_function_of(fn, impl)), plan.decision.candidates[0])


def _after_fast_path(
    state: State, policy: SelectionPolicy, decision: Decision, call: Call, failed: OpImpl, error: Exception
) -> Any:
    """Go on after an implementation failed on the fast path: raise its error, or try the other candidates."""
    candidates = call.branch(decision).candidates
    try:
        # Tensors on another device are declined, not failed: the fast path does not look at devices.
        wrong_device = isinstance(error, NotSupported) and not (state.frozen or failed.takes_device(call.kind.device))
        if not wrong_device and must_raise(state, error, policy):
            raise error
        if not _restored(call, error):
            state.watch(failed)
            add_note(
                error,
                f"fl_dispatch: '{failed.impl_id}' of '{call.op_name}' may have overwritten an argument of which no "
                "copy exists, so no other implementation was tried. One that declines arguments says so in 'supports', "
                "or raises fl_dispatch.NotSupported before it writes.",
            )
            raise error
        _warn(failed, call, error)
        attempts = _Attempts(state, policy, decision, call)
        if wrong_device:
            return attempts.run(candidates)
        attempts.failures.append((failed, error))
        return attempts.run([impl for impl in candidates if impl is not failed])
    finally:
        del error  # the traceback holds this frame, and with it the arguments


def _restored(
    call: Call, error: Exception, parts: Sequence[Any] | None = None, copies: Sequence[Any] | None = None
) -> bool:
    """Restore a call's original arguments after an implementation raised; return whether that succeeded.

    Args:
        call: the call.
        error: the exception.
        parts: the objects to restore from the copies; by default all that may be overwritten.
        copies: the old values, if they were kept.
    """
    if isinstance(error, NotSupported):
        return True  # it promises that nothing was written
    return not call.holds_state() and put_back(call.updated() if parts is None else parts, copies)


def why_not_for_call(state: State, impl: OpImpl, call: Call) -> str:
    """Return why an implementation does not run for these arguments; empty if it does."""
    banned = state.failures.for_kind(impl, call.kind)
    if banned:
        return banned
    if not impl.takes_device(call.kind.device):
        return f"it takes tensors on {', '.join(impl.device_types or ())}, not on {call.kind.device}"
    try:
        return call.why_declined(impl, state.registry.convention(impl))
    except Exception as error:  # raised by a foreign 'supports'
        reason = f"its 'supports' raised {text_of(error)}"
        if state.failures.is_new_problem(impl, type(error).__name__):
            logger.warning("Implementation '%s' is left out of op '%s': %s", impl.impl_id, impl.op_name, reason)
        return reason


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The candidates of one call, tried in turn on its original arguments.

    Attributes:
        failures: implementations that failed so far, and their errors; emptied at the end, because tracebacks hold the
            arguments.
    """

    state: State
    policy: SelectionPolicy
    decision: Decision
    call: Call
    failures: list[tuple[OpImpl, Exception]] = field(default_factory=list)

    def run(self, impls: Sequence[OpImpl]) -> Any:
        """Return the result of the first implementation that takes the call and does not fail."""
        state, call = self.state, self.call
        reasons: list[str] = []
        try:
            for index, impl in enumerate(impls):
                if reason := why_not_for_call(state, impl, call):
                    reasons.append(f"{impl.impl_id}: {reason}")
                    continue
                self._refuse_divergence()
                updated = call.updated()
                last = index + 1 == len(impls) or self.policy.strict
                copies = None if last or not self._needs_copies(impl) else copies_of(updated)
                wrote = bool(updated) or call.operator is None
                try:
                    result = call.run(state.counter.function(impl), state.registry.convention(impl))
                    if not state.proofs.holds(impl, wrote=wrote):
                        self._check_result(impl, result)
                except Exception as error:
                    self.failures.append((impl, error))
                else:
                    self._succeeded(impl, wrote=wrote)
                    return result
                self._go_on_or_raise(updated, copies, last)
            if not self.failures:
                raise NoImplementationError(call.op_name, [*reasons, *self.decision.skipped_reasons()])
            self._raise_first(reasons)
        finally:
            self.failures.clear()

    def _refuse_divergence(self) -> None:
        """Raise :class:`RankDivergenceError` if this rank alone would go on with another implementation."""
        if not self.state.lockstep:
            return
        for impl, error in self.failures:
            if not declines(error):  # all ranks decline the same call
                raise RankDivergenceError(
                    f"'{impl.impl_id}' of '{self.call.op_name}' failed ({text_of(error)}), and this rank runs in "
                    "lockstep with others that did not fall back; the step is aborted. To leave it out on all ranks: "
                    f"{self._order_without(impl)}"
                ) from error

    def _order_without(self, impl: OpImpl) -> str:
        """Return the operator's order without one candidate, in the form of a user's setting."""
        others = "|".join(f"impl:{other.impl_id}" for other in self.decision.candidates if other is not impl)
        return f"VLLM_FL_PER_OP='{self.call.op_name}={others}'"

    def _needs_copies(self, impl: OpImpl) -> bool:
        """Whether to copy what it may overwrite; never in a capture, because the graph would record the copy."""
        proofs = self.state.proofs
        return (not proofs.holds(impl, wrote=True) or proofs.watches(impl)) and not is_capturing()

    def _check_result(self, impl: OpImpl, result: Any) -> None:
        """Compare a first result with the declaration, because the next layer would fail on it or misread it.

        Raises:
            BrokenPromiseError: the result is not as declared.
        """
        operator = self.call.operator
        if operator is not None and (problem := broken_promise(operator, self.call.args, result)):
            raise BrokenPromiseError(f"{impl.impl_id} of {operator.name}: {problem}")

    def _succeeded(self, impl: OpImpl, *, wrote: bool) -> None:
        """Record the success, and ban implementations that failed before it."""
        state, call, banned = self.state, self.call, False
        state.prove(impl, wrote=wrote)
        if not self.failures:
            return
        for failed, error in self.failures:
            if not declines(error):
                state.failures.record(failed, call.kind, error)
                banned = True
            error.with_traceback(None)  # the call is over, and the frames of its errors hold the arguments
        logger.log(logging.INFO if banned else logging.DEBUG, "Op '%s' fallback to %s", call.op_name, impl)
        if banned:
            state.changed({call.op_name})

    def _go_on_or_raise(self, updated: Sequence[Any], copies: Sequence[Any] | None, last: bool) -> None:
        """Restore the arguments for the next candidate, or raise the last failure if that is impossible."""
        impl, error = self.failures[-1]
        try:
            if must_raise(self.state, error, self.policy):
                raise error
            if not _restored(self.call, error, () if last else updated, copies):
                raise error
            _warn(impl, self.call, error)
        finally:
            del error

    def _raise_first(self, reasons: Sequence[str]) -> None:
        """Raise the first failure, with notes on the others."""
        op_name, first = self.call.op_name, self.failures[0][1]
        for impl, other in self.failures[1:]:
            add_note(first, f"fl_dispatch: '{impl.impl_id}' of '{op_name}' failed too: {text_of(other)}")
        for reason in reasons:
            add_note(first, f"fl_dispatch: '{op_name}' not tried with {reason}")
        try:
            raise first
        finally:
            del first


def _warn(impl: OpImpl, call: Call, error: BaseException) -> None:
    text = text_of(error)
    if declines(error):
        logger.debug("Implementation '%s' declined op '%s' (%s): %s", impl.impl_id, call.op_name, call.kind, text)
    else:
        logger.warning("Implementation '%s' failed for op '%s': %s (%s)", impl.impl_id, call.op_name, text, call.kind)
