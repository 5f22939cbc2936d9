"""Shadow mode: a drawn live call runs through a second implementation too, and the results are compared.

The caller always gets what the first implementation gave. The second run comes after it, on copies of what the first
one may overwrite, so it can change nothing. Nothing of this is in a table unless the user asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WrongResultError, text_of
from ..knowledge.failures import is_capturing
from ..knowledge.sampling import Sampling
from ..logger_manager import get_logger
from ..ops import OPERATORS, Access, Operator
from ..ops.results import errors, flat
from ..selection.decision import Decision
from ..signatures import Convention
from ..state import State
from ..types import BackendImplKind, OpImpl
from .arguments import Call
from .layer_form import read_from
from .recovery import refusal
from .table import MADE_FROM

logger = get_logger(__name__)

ACCEPTED = 2.0
"""Tolerances that two implementations may differ by, because each may be one off."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between two results.

    Args:
        tolerances: its size; NaN where one of the two has no number, infinite where the results cannot be compared.
        where: in words.
    """

    tolerances: float
    where: str


def watched(state: State, impl: OpImpl, decision: Decision, scope: str | None, fn: Callable[..., Any]) -> Any:
    """The function that stands in the table for an implementation while shadow mode is on.

    Args:
        state: whose sampling draws the calls.
        impl: the implementation.
        decision: that it comes from.
        scope: the layer that it stands there for.
        fn: its function, or a counting wrapper of it.
    """
    sampling, operator, convention = state.sampling, OPERATORS.get(impl.op_name), state.registry.convention(impl)
    if sampling is None or operator is None or convention is None or operator.selection:
        return fn
    if not sampling.wants(impl.op_name) or sampling.is_second(impl):
        return fn
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
        return _compared(state, sampling, impl, decision, _Form(operator, convention, scope), fn, args, kwargs)

    shadowed.__dict__[MADE_FROM] = decision
    return shadowed


@dataclass(frozen=True)
class _Form:
    """The arguments of an implementation as those of its operator."""

    operator: Operator
    convention: Convention
    scope: str | None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The operator's call that an implementation's arguments come from."""
        operator, layer = self.operator, None
        given: dict[str, Any] = {}
        if self.convention.layer_first:
            layer, *rest = args
            args = tuple(rest)
            given = read_from(operator, layer)
        given |= dict(zip(self.convention.takes, args, strict=False)) | kwargs
        return Call(operator.name, operator, self.scope, (), given, layer)


def _compared(
    state: State,
    sampling: Sampling,
    impl: OpImpl,
    decision: Decision,
    form: _Form,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the implementation as ever, and then the second one on what the arguments were before."""
    call = second = None
    with sampling.working():
        try:
            call = form.call(args, kwargs)
            found = _second(state, sampling, impl, call)
            second = _beside(call) if found is not None else None
        except Exception as error:  # the caller's call must run whatever goes wrong here
            _unfit(state, impl, text_of(error))
    result = fn(*args, **kwargs)
    if call is None or second is None or found is None:
        return result
    with sampling.working():
        try:
            other = second.run(found.fn, state.registry.convention(found))
            with torch.no_grad():
                difference = _difference(form.operator, call, result, second, other)
            state.findings.compared(impl)
            if not difference.tolerances <= ACCEPTED:
                _report(state, sampling, impl, found, decision, call, difference)
        except Exception as error:  # the second implementation's, or of memory that there is not twice
            _unfit(state, impl, text_of(error))
    return result


def _second(state: State, sampling: Sampling, impl: OpImpl, call: Call) -> OpImpl | None:
    """The implementation to compare with, if one takes the call."""
    reasons = []
    for other in state.registry.get_implementations(impl.op_name):
        if other is impl or not sampling.is_second(other):
            continue
        available, why = state.availability.of(other)
        reason = ("" if available else why) or refusal(state, other, call)
        if not reason:
            return other
        reasons.append(f"{other.impl_id}: {reason}")
    _unfit(state, impl, "; ".join(reasons) or f"no implementation is '{sampling.wish.second}'")
    return None


def _beside(call: Call) -> Call | None:
    """The same call with memory of its own for everything that it may write."""
    operator = call.operator
    assert operator is not None
    values = dict(zip(operator.parameters, call.args, strict=True))
    written = operator.written(call.args)
    if any(access is Access.STATE for access, _ in written.values()):
        if operator.small_state is None:
            raise NotImplementedError("it writes a state that is too large to copy, and declares no small one")
        small = operator.small_state.arguments(*operator.operands(call.args))
        values |= dict(zip(operator.parameters, small, strict=False))
    else:
        with torch.no_grad():  # rows that a call leaves alone must be equal in both, so outputs are copied too
            values |= {name: tensor.clone() for name, (_, tensor) in written.items()}
    return Call(operator.name, operator, call.kind.scope, (), values, call.layer)


def _difference(operator: Operator, call: Call, result: Any, second: Call, other: Any) -> Difference:
    """The largest difference between the results, and between what was written of a state."""
    results, others = flat(result), flat(other)
    if len(results) != len(others):
        return Difference(math.inf, f"{len(results)} results instead of {len(others)}")
    pairs = [(f"output {index}", *pair) for index, pair in enumerate(zip(results, others, strict=True))]
    if operator.small_state is not None and call.holds_state():
        states = (operator.small_state.written(*operator.operands(one.args)) for one in (call, second))
        pairs += [(f"state {index}", *pair) for index, pair in enumerate(zip(*states, strict=True))]
    numbers = [pair for pair in pairs if isinstance(pair[2], Tensor) and pair[2].is_floating_point()]
    worst = Difference(0.0, "")
    args = call.args
    for where, one, wanted in numbers or pairs:  # beside weights that are equal, equal scores may change places
        found = _of_tensors(operator, args, where, one, wanted)
        if not found.tolerances <= worst.tolerances:
            worst = found
    return worst


def _of_tensors(operator: Operator, args: tuple[Any, ...], where: str, one: Any, wanted: Any) -> Difference:
    if not (isinstance(one, Tensor) and isinstance(wanted, Tensor)):
        return Difference(0.0 if one is wanted else math.inf, f"{where} is {type(one).__name__}")
    if one.shape != wanted.shape or one.dtype != wanted.dtype:
        text = f"{one.dtype} {list(one.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
        return Difference(math.inf, f"{where} is {text}".replace("torch.", ""))
    if not one.numel():
        return Difference(0.0, "")
    if not one.is_floating_point():
        wrong = int((one != wanted).sum())
        return Difference(math.inf if wrong else 0.0, f"{where}: {wrong} of {one.numel()} integers differ")
    wide = wanted.to(torch.float64 if wanted.dtype is torch.float64 else torch.float32)
    size = torch.where(wide.isfinite(), wide, 0.0).square().mean(-1, keepdim=True).sqrt().clamp(min=1.0)
    share = errors(one, wide, operator.tolerance(_tolerated(one.dtype), args), size)[1].flatten()
    place = share.argmax()  # of NaN, if there is one
    largest, got, expected = torch.stack(
        (share[place], one.flatten()[place].to(wide.dtype), wide.flatten()[place])
    ).tolist()
    index = [int(part) for part in torch.unravel_index(place, one.shape)]
    text = f"{where} at {index}: {got:.6g} instead of {expected:.6g}, {largest:.3g} times the tolerance"
    return Difference(largest, text)


def _tolerated(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose tolerance holds; formats of 8 bits are only ever copied, as keys in a cache are."""
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def _unfit(state: State, impl: OpImpl, reason: str) -> None:
    """Tell once of an operator whose calls cannot be compared, or of one such call."""
    state.findings.unfit[impl.op_name] = reason
    if state.failures.tell_once(impl, "shadow"):
        logger.warning("shadow: calls of '%s' by '%s' are not all compared: %s", impl.op_name, impl.impl_id, reason)


def _report(
    state: State,
    sampling: Sampling,
    impl: OpImpl,
    second: OpImpl,
    decision: Decision,
    call: Call,
    difference: Difference,
) -> None:
    """Record a difference; the first of a kind is a WARNING, and may be a ban."""
    known = state.findings.known(impl, call.kind)
    text = f"differs from '{second.impl_id}': {difference.where}"
    outcome = _take_out(state, sampling, impl, second, decision, call, text)  # anew: a policy change lifts bans
    state.findings.add(impl, second, call.kind, difference.tolerances, difference.where, outcome)
    if known is None:
        logger.warning("shadow: '%s' by '%s' %s (%s); %s", impl.op_name, impl.impl_id, text, call.kind, outcome)


def _take_out(
    state: State, sampling: Sampling, impl: OpImpl, second: OpImpl, decision: Decision, call: Call, text: str
) -> str:
    """Ban a wrong implementation for this kind of arguments where that is safe; returns what was done, in words."""
    if not sampling.wish.ban:
        return "it goes on, because shadow_action is 'log'"
    if second.kind is not BackendImplKind.REFERENCE:
        return "it goes on, because only the reference says which of the two is wrong"
    if state.frozen:
        return "it goes on, because compiled code or a captured graph holds this choice"
    if state.lockstep or _several_ranks():
        return "it goes on, because ranks run in step and this one alone must not choose anew"
    others = [other for other in call.branch(decision).candidates if other is not impl]
    if not any(not refusal(state, other, call) for other in others):
        return "it goes on, because the policy leaves no other implementation for these arguments"
    state.failures.record(impl, call.kind, WrongResultError(text))
    state.findings.ban(impl, call.kind)
    state.changed({impl.op_name})
    return "it is banned for these arguments"


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
