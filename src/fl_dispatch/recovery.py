"""Everything after an exception, and the path of calls that need care.

Three rules decide. *Never a wrong answer*: the next implementation runs on the original arguments, or the call raises.
*The input may be guilty*: if every candidate fails, nobody is banned. *A dead device stays dead*: nothing is retried
after an error that kills the device context, nor inside a graph capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import NoImplementationError, NotSupported, RankDivergenceError
from .failures import ArgumentKind, declines, is_capturing, is_dead_device, is_out_of_memory
from .logger_manager import get_logger
from .ops import Access, Operator
from .types import OpImpl

if TYPE_CHECKING:
    from .manager import OpManager
    from .selection import Decision
    from .selection_policy import SelectionPolicy

logger = get_logger(__name__)


class Settled(Exception):  # noqa: N818
    """Carries a final error out of a table entry, past the caller's recovery."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Call:
    """One call that needs care: its arguments in every form that an implementation may want."""

    __slots__ = ("args", "kind", "kwargs", "layer", "op_name", "operator", "scope")

    def __init__(
        self,
        op_name: str,
        operator: Operator | None,
        scope: str | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        layer: Any = None,
    ) -> None:
        self.op_name, self.operator, self.scope, self.layer = op_name, operator, scope, layer
        if operator is not None:
            args, kwargs = operator.bind(args, kwargs), {}
        self.args, self.kwargs = args, kwargs
        self.kind = ArgumentKind.of(args, scope)

    def given(self, names: Sequence[str]) -> str | None:
        """The first of these parameters that the call gives a value other than its default."""
        if self.operator is None or not names:
            return None
        values = dict(zip(self.operator.parameters, self.args, strict=True))
        for name in names:
            value, default = values[name], self.operator.parameters[name].default
            if value is not default and (isinstance(value, torch.Tensor) or value != default):
                return name
        return None

    def updated(self) -> list[torch.Tensor]:
        """The tensors whose old values a retry needs."""
        return [tensor for access, tensor in self._written() if access is Access.UPDATE]

    def holds_state(self) -> bool:
        """Whether it writes a state that cannot be copied."""
        return any(access is Access.STATE for access, _ in self._written())

    def _written(self) -> list[tuple[Access, torch.Tensor]]:
        return [] if self.operator is None else list(self.operator.written(self.args).values())


def must_raise(error: BaseException, policy: SelectionPolicy) -> bool:
    """Whether an implementation's error goes to the caller unchanged."""
    return policy.strict or is_out_of_memory(error) or is_dead_device(error) or is_capturing()


def candidates(decision: Decision, call: Call) -> tuple[OpImpl, ...]:
    """The implementations that may run for a call, best first."""
    if not decision.conditional or call.operator is None:
        return decision.candidates
    return decision.candidates_for(call.operator.workload(*call.args))


def run(manager: OpManager, policy: SelectionPolicy, decision: Decision, call: Call) -> Any:
    """Run the first candidate that fits, with everything a first call needs; falls back where that is safe.

    Raises:
        NoImplementationError: no candidate fits the arguments; it says why for each.
    """
    return _attempt(manager, policy, decision, candidates(decision, call), call, [])


def recover(
    manager: OpManager, policy: SelectionPolicy, decision: Decision, call: Call, failed: OpImpl, error: Exception
) -> Any:
    """Go on after an implementation raised on the fast path, where no copy of its arguments was kept."""
    if must_raise(error, policy):
        raise error
    refusal = _supports(failed, call)
    if isinstance(refusal, Exception):  # the predicate raised, the implementation never ran
        return _attempt(manager, policy, decision, candidates(decision, call), call, [])
    if not isinstance(error, NotSupported) and (call.updated() or call.holds_state()):
        manager.watch(failed)
        error.add_note(
            f"fl_dispatch: '{failed.impl_id}' of '{call.op_name}' may have overwritten an argument of which no copy "
            "exists, so no other implementation was tried. An implementation that declines arguments says so in "
            "'supports', or raises fl_dispatch.errors.NotSupported before it writes."
        )
        raise error
    _warn(failed, call, error)
    others = [impl for impl in candidates(decision, call) if impl is not failed]
    return _attempt(manager, policy, decision, others, call, [(failed, error)])


def refusal(manager: OpManager, impl: OpImpl, call: Call) -> str:
    """Why an implementation does not run for these arguments; empty when it does."""
    banned = manager.failures.for_kind(impl, call.kind)
    if banned:
        return banned
    convention = manager.registry.convention(impl)
    if convention is not None:
        given = call.given(convention.left_out)
        if given:
            return f"it does not take '{given}'"
    answer = _supports(impl, call)
    if answer is True:
        return ""
    if isinstance(answer, Exception):
        return f"its 'supports' raised {type(answer).__name__}: {answer}"
    return str(answer) if answer else "it does not support these arguments"


def _supports(impl: OpImpl, call: Call) -> bool | str | Exception:
    if impl.supports is None:
        return True
    try:
        return impl.supports(*call.args, **call.kwargs)
    except Exception as error:
        return error


def _attempt(
    manager: OpManager,
    policy: SelectionPolicy,
    decision: Decision,
    impls: Sequence[OpImpl],
    call: Call,
    failures: list[tuple[OpImpl, Exception]],
) -> Any:
    reasons = []
    for index, impl in enumerate(impls):
        reason = refusal(manager, impl, call)
        if reason:
            reasons.append(f"{impl.impl_id}: {reason}")
            continue
        if failures:
            _may_fall_back(manager, call, failures)
        updated = call.updated()
        more = index + 1 < len(impls) and not policy.strict
        copies = None
        if updated and more and not is_capturing() and _needs_copies(manager, impl):
            copies = [(tensor, tensor.clone()) for tensor in updated]
        try:
            result = manager.invoke(impl, call)
        except Exception as error:
            failure = error
        else:
            _succeeded(manager, impl, call, failures, wrote=bool(updated))
            return result
        if must_raise(failure, policy) or (
            not isinstance(failure, NotSupported) and _is_lost(call, updated, copies, more)
        ):
            raise failure
        for tensor, copy in copies or ():
            tensor.copy_(copy)
        _warn(impl, call, failure)
        failures.append((impl, failure))
    if not failures:
        raise NoImplementationError(call.op_name, [*reasons, *decision.skipped_reasons()])
    first = failures[0][1]
    for impl, other in failures[1:]:
        first.add_note(f"fl_dispatch: '{impl.impl_id}' of '{call.op_name}' failed too: {type(other).__name__}: {other}")
    for reason in reasons:
        first.add_note(f"fl_dispatch: '{call.op_name}' not tried with {reason}")
    raise first


def _needs_copies(manager: OpManager, impl: OpImpl) -> bool:
    return not manager.proofs.holds(impl, wrote=True) or manager.proofs.watches(impl)


def _is_lost(call: Call, updated: list[torch.Tensor], copies: object, more: bool) -> bool:
    """Whether the original arguments are gone, so that no other implementation may run."""
    return call.holds_state() or (bool(updated) and copies is None and more)


def _may_fall_back(manager: OpManager, call: Call, failures: list[tuple[OpImpl, Exception]]) -> None:
    if manager.lockstep:
        impl, error = failures[0]
        raise RankDivergenceError(
            f"'{impl.impl_id}' of '{call.op_name}' failed ({type(error).__name__}: {error}), and this rank runs in "
            "lockstep with others that did not fall back; the step is aborted"
        ) from error


def _succeeded(
    manager: OpManager, impl: OpImpl, call: Call, failures: list[tuple[OpImpl, Exception]], *, wrote: bool
) -> None:
    manager.prove(impl, wrote=wrote)
    if not failures:
        return
    logger.info("Op '%s' fallback to %s", call.op_name, impl)
    for failed, error in failures:
        if not declines(error):
            manager.failures.record(failed, call.kind, error)
    manager.republish(frozenset({call.op_name}))


def _warn(impl: OpImpl, call: Call, error: BaseException) -> None:
    if declines(error):
        logger.info("Implementation '%s' declined op '%s' (%s): %s", impl.impl_id, call.op_name, call.kind, error)
    else:
        logger.warning(
            "Implementation '%s' failed for op '%s': %s: %s (%s)",
            impl.impl_id,
            call.op_name,
            type(error).__name__,
            error,
            call.kind,
        )
