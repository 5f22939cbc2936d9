"""Everything after an exception, and the path of calls that need care.

Three rules decide. *Never a wrong answer*: the next implementation runs on the original arguments, or the call raises.
*The input may be guilty*: if every candidate fails, nobody is banned. *A dead device stays dead*: nothing is retried
after an error that kills the device context, nor inside a graph capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
_Failures = list[tuple[OpImpl, Exception]]
_is_compiling = torch.compiler.is_dynamo_compiling


class Settled(Exception):  # noqa: N818
    """Carries a final error out of a table entry, past the caller's recovery."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def must_raise(state: State, error: BaseException, policy: SelectionPolicy) -> bool:
    """Whether an implementation's error goes to the caller unchanged."""
    if policy.strict or state.frozen:
        return True
    return is_out_of_memory(error) or is_dead_device(error) or is_capturing()


def run(state: State, policy: SelectionPolicy, decision: Decision, call: Call) -> Any:
    """Run the first candidate that fits, with everything a first call needs; falls back where that is safe.

    Raises:
        NoImplementationError: no candidate fits the arguments; it says why for each.
    """
    return _attempt(state, policy, decision, call.branch(decision).candidates, call, [])


def recover(
    key: str,
    table: DispatchTable,
    fn: Callable[..., Any],
    error: Exception,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Go on after a table's function raised on the fast path, where no copy of its arguments was kept."""
    if _is_compiling():  # while it was traced: the next one is, if it is known that nothing was written
        if isinstance(error, NotSupported):
            return table.plans[key].declined(*args, **kwargs)
        raise error
    call = None
    try:
        if type(error) is Settled:
            raise error.error
        plan = table.plans.get(key)
        if plan is None:
            raise error  # the operator was taken away during the call: nobody can take over
        try:
            call = Call.of(plan.op_name, plan.scope, args, kwargs)
        except TypeError:
            raise error from None  # the call does not fit the operator: the caller's mistake
        decision = plan.decision if plan.entry is fn else getattr(fn, MADE_FROM, None)
        failed = _bare(table.state, fn, plan) if decision is None else call.branch(decision).candidates[0]
        return _after_fast_path(table.state, table.policy, decision or plan.decision, call, failed, error)
    finally:
        del error, call, args, kwargs


def _bare(state: State, fn: Callable[..., Any], plan: Plan) -> OpImpl:
    """The implementation that stood bare in the table until somebody replaced its entry during the call."""
    impls = state.registry.get_implementations(plan.op_name)
    return next((impl for impl in impls if state.counter.is_function_of(fn, impl)), plan.decision.candidates[0])


def _after_fast_path(
    state: State, policy: SelectionPolicy, decision: Decision, call: Call, failed: OpImpl, error: Exception
) -> Any:
    candidates = call.branch(decision).candidates
    try:
        # Tensors on another device are declined, not failed: the fast path does not look at devices.
        unasked = isinstance(error, NotSupported) and not (state.frozen or failed.takes_device(call.kind.device))
        if not unasked and must_raise(state, error, policy):
            raise error
        if not isinstance(error, NotSupported) and (call.updated() or call.holds_state()):
            state.watch(failed)
            add_note(
                error,
                f"fl_dispatch: '{failed.impl_id}' of '{call.op_name}' may have overwritten an argument of which no "
                "copy exists, so no other implementation was tried. One that declines arguments says so in 'supports', "
                "or raises fl_dispatch.NotSupported before it writes.",
            )
            raise error
        _warn(failed, call, error)
        if unasked:
            return _attempt(state, policy, decision, candidates, call, [])
        others = [impl for impl in candidates if impl is not failed]
        return _attempt(state, policy, decision, others, call, [(failed, error)])
    finally:
        del error  # its traceback holds this frame, and with it the arguments


def refusal(state: State, impl: OpImpl, call: Call) -> str:
    """Why an implementation does not run for these arguments; empty when it does."""
    banned = state.failures.for_kind(impl, call.kind)
    if banned:
        return banned
    if not impl.takes_device(call.kind.device):
        return f"it takes tensors on {', '.join(impl.device_types or ())}, not on {call.kind.device}"
    try:
        return call.refusal(impl, state.registry.convention(impl))
    except Exception as error:  # of a stranger's 'supports'
        reason = f"its 'supports' raised {text_of(error)}"
        if state.failures.tell_once(impl, type(error).__name__):
            logger.warning("Implementation '%s' is left out of op '%s': %s", impl.impl_id, impl.op_name, reason)
        return reason


def _attempt(
    state: State,
    policy: SelectionPolicy,
    decision: Decision,
    impls: Sequence[OpImpl],
    call: Call,
    failures: _Failures,
) -> Any:
    reasons = []
    try:
        for index, impl in enumerate(impls):
            reason = refusal(state, impl, call)
            if reason:
                reasons.append(f"{impl.impl_id}: {reason}")
                continue
            if failures:
                _may_fall_back(state, call, failures)
            updated = call.updated()
            last = index + 1 == len(impls) or policy.strict
            copies = None if last or not _needs_copies(state, impl) else _copy(updated)
            wrote = bool(updated) or call.operator is None
            try:
                result = call.run(state.counter.function(impl), state.registry.convention(impl))
                if not state.proofs.holds(impl, wrote=wrote):
                    _keeps_promise(impl, call, result)
            except Exception as error:
                failures.append((impl, error))
            else:
                _succeeded(state, impl, call, failures, wrote=wrote)
                return result
            _go_on_or_raise(state, policy, call, failures[-1], updated, copies, last)
        if not failures:
            raise NoImplementationError(call.op_name, [*reasons, *decision.skipped_reasons()])
        _raise_first(call, failures, reasons)
    finally:
        failures.clear()  # tracebacks hold this frame, and with it the arguments


def _keeps_promise(impl: OpImpl, call: Call, result: Any) -> None:
    """Compare a first result with the declaration, because the next layer would fail by it, or read it wrongly.

    Raises:
        BrokenPromiseError: it is not as declared.
    """
    if call.operator is not None and (problem := broken_promise(call.operator, call.args, result)):
        raise BrokenPromiseError(f"{impl.impl_id} of {call.op_name}: {problem}")


def _go_on_or_raise(
    state: State,
    policy: SelectionPolicy,
    call: Call,
    failure: tuple[OpImpl, Exception],
    updated: Sequence[Any],
    copies: Sequence[Any] | None,
    last: bool,
) -> None:
    """Put the arguments back for the next candidate, or raise the failure if that cannot be done."""
    impl, error = failure
    try:
        wrote_nothing = isinstance(error, NotSupported)
        if must_raise(state, error, policy) or (not wrote_nothing and call.holds_state()):
            raise error
        if not (wrote_nothing or last) and not put_back(updated, copies):
            raise error
        _warn(impl, call, error)
    finally:
        del error, failure


def _copy(parts: Sequence[Any]) -> list[Any] | None:
    return None if is_capturing() else copies_of(parts)  # a copy would be recorded into the graph


def _raise_first(call: Call, failures: _Failures, reasons: Sequence[str]) -> None:
    first = failures[0][1]
    for impl, other in failures[1:]:
        add_note(first, f"fl_dispatch: '{impl.impl_id}' of '{call.op_name}' failed too: {text_of(other)}")
    for reason in reasons:
        add_note(first, f"fl_dispatch: '{call.op_name}' not tried with {reason}")
    try:
        raise first
    finally:
        del first


def _needs_copies(state: State, impl: OpImpl) -> bool:
    return not state.proofs.holds(impl, wrote=True) or state.proofs.watches(impl)


def _may_fall_back(state: State, call: Call, failures: _Failures) -> None:
    failed = [(impl, error) for impl, error in failures if not declines(error)]  # all ranks decline alike
    if state.lockstep and failed:
        impl, error = failed[0]
        raise RankDivergenceError(
            f"'{impl.impl_id}' of '{call.op_name}' failed ({text_of(error)}), and this rank runs in lockstep with "
            "others that did not fall back; the step is aborted"
        ) from error


def _succeeded(state: State, impl: OpImpl, call: Call, failures: _Failures, *, wrote: bool) -> None:
    state.prove(impl, wrote=wrote)
    if not failures:
        return
    banned = False
    for failed, error in failures:
        if not declines(error):
            state.failures.record(failed, call.kind, error)
            banned = True
        error.with_traceback(None)  # it is settled, and its frames hold the arguments
    logger.log(logging.INFO if banned else logging.DEBUG, "Op '%s' fallback to %s", call.op_name, impl)
    if banned:
        state.changed({call.op_name})


def _warn(impl: OpImpl, call: Call, error: BaseException) -> None:
    if declines(error):
        logger.debug("Implementation '%s' declined op '%s' (%s): %s", impl.impl_id, call.op_name, call.kind, error)
    else:
        text = text_of(error)
        logger.warning("Implementation '%s' failed for op '%s': %s (%s)", impl.impl_id, call.op_name, text, call.kind)
