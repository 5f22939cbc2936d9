"""Functions that compiled code runs in place of a table's entry: an opaque view, or a choice that Dynamo can trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import NotSupported
from ..ops import Mode, Operator
from ..ops.declaration import leading_tensor
from ..selection.decision import Decision
from ..settings.selection_policy import SelectionPolicy
from ..signatures import Convention
from ..state import State, is_elsewhere
from ..types import OpImpl
from . import generated

Function = Callable[..., Any]


def view_of(state: State, policy: SelectionPolicy, decision: Decision, operator: Operator | None) -> Function | None:
    """The opaque view that compiled code calls instead of tracing into the choice; ``None`` where it may look inside.

    A view is needed where a trace cannot hold the choice: Dynamo cannot trace what may run, the operator may not be
    traced, the choice depends on the call, or dispatch is frozen, so that the guards of a predicate may be dropped.
    """
    if operator is None or Mode.OPAQUE not in operator.modes or state.view is None:
        return None
    runs = state.who_may_run(decision, decision.branches[-1])
    needed = (
        decision.conditional
        or Mode.INLINE not in operator.modes
        or any(impl.opaque for impl in runs)
        or (state.frozen and len(runs) > 1)
    )
    if not needed:
        return None
    # The layer's name would make every layer's graph another one, so it stands there only where a rule needs it.
    scope = decision.scope
    banned_here = any(state.failures.kinds(impl, scope) != state.failures.kinds(impl, None) for impl in runs)
    return state.view(operator, scope or "" if banned_here or policy.singles_out(operator.name, scope) else "")


def traced_of(
    state: State,
    decision: Decision,
    operator: Operator | None,
    form: str,
    view: Function | None,
    candidates: Sequence[OpImpl],
) -> Function:
    """What Dynamo traces in place of the careful path: the choice among candidates, made of guards alone.

    An implementation that is banned for some calls in this scope is left out, since a trace serves many calls.
    """

    def nobody(*args: Any, **kwargs: Any) -> Any:
        raise NotSupported(f"no implementation of '{decision.op_name}' fits these arguments")

    if view is not None and operator is not None and decision.candidates:
        whole = Convention(takes=tuple(operator.parameters), defaults=False)
        return generated.direct(operator, decision.candidates[0], whole, form, view, nobody, ask=False)
    function: Function = nobody
    for impl in reversed(candidates):
        if not state.failures.kinds(impl, decision.scope):
            convention = state.registry.convention(impl)
            first = generated.direct(operator, impl, convention, form, impl.fn, function)
            if is_elsewhere(impl):
                function = _on_its_devices(impl, operator.hints if operator else (), first, function)
            else:
                function = first if function is nobody else _or_next(first, function)
    return function


def _on_its_devices(impl: OpImpl, hints: Sequence[str], first: Function, other: Function) -> Function:
    """The first function for tensors on the implementation's devices, which a trace knows; the other one elsewhere."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensor = leading_tensor((*args, *(value for name, value in kwargs.items() if name not in hints)))
        fits = impl.takes_device("none" if tensor is None else tensor.device.type)
        return first(*args, **kwargs) if fits else other(*args, **kwargs)

    return chosen


def _or_next(first: Function, other: Function) -> Function:
    """The first function, or the other one where the first declines while it is traced."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            return first(*args, **kwargs)
        except NotSupported:
            return other(*args, **kwargs)

    return chosen
