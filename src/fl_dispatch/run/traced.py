"""Functions that compiled code runs in place of a table's entry: an opaque view, or a choice that Dynamo can trace."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import NotSupported
from ..ops import Mode, Operator
from ..ops.declaration import leading_tensor
from ..selection.decision import Decision
from ..settings.selection_policy import SelectionPolicy
from ..signatures import Convention
from ..state import Function, State, is_elsewhere
from ..types import OpImpl
from . import generated, trial

_HANDLED_BY_DYNAMO = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, os))
"""The folders of PyTorch and of the standard library."""


@dataclass(frozen=True, slots=True)
class Site:
    """One decision in one form of call, with the functions that stand for it in a trace.

    Args:
        state: of the manager that decided.
        policy: the policy of the decision.
        decision: the implementations that may run, best first.
        operator: the declaration; ``None`` for an undeclared operator.
        form: of the call, see :mod:`.keys`.
    """

    state: State
    policy: SelectionPolicy
    decision: Decision
    operator: Operator | None
    form: str

    def direct(
        self,
        impl: OpImpl,
        fn: Function,
        otherwise: Function,
        unproven: Sequence[str] | None = (),
        view: Function | None = None,
        declined: Function | None = None,
    ) -> Function:
        """Return a function that runs one implementation, see :func:`.generated.direct`."""
        convention = self.state.registry.convention(impl)
        return generated.direct(
            self.operator, impl, convention, self.form, fn, otherwise, unproven, view=view, declined=declined
        )

    def reachable(self) -> list[OpImpl]:
        """Return the candidates up to the first one that takes every call, for calls that meet no rule's condition."""
        return self.state.reachable(self.decision, self.decision.branches[-1])

    def needed_view(self) -> Function | None:
        """Return the opaque view that compiled code must call instead of tracing the choice; ``None`` if it may trace.

        A view is needed if a trace cannot hold the choice: Dynamo cannot trace a candidate, the operator may not be
        traced, the choice depends on the call, a host looks for the calls, or dispatch is frozen, so that a predicate's
        guards may be dropped.
        """
        operator, state = self.operator, self.state
        if operator is None or Mode.OPAQUE not in operator.modes or state.view is None:
            return None
        runs = self.reachable()
        needed = (
            self.decision.conditional
            or Mode.INLINE not in operator.modes
            or operator.name in state.whole
            or any(state.traces.obstacle(impl) for impl in runs)
            or (state.frozen and len(runs) > 1)
        )
        return self._view(operator) if needed else None

    def _view(self, operator: Operator) -> Function:
        failures, scope = self.state.failures, self.decision.scope
        assert self.state.view is not None
        # The layer's name would make every layer's graph different, so the view has it only if a rule needs it.
        banned_here = any(failures.kinds(impl, scope) != failures.kinds(impl, None) for impl in self.reachable())
        named = banned_here or self.policy.singles_out(operator.name, scope)
        return self.state.view(operator, scope or "" if named else "")

    def traced(self, view: Function | None, candidates: Sequence[OpImpl]) -> Function:
        """Return the function that Dynamo traces in place of the careful path: a choice by guards alone.

        An implementation that is banned for some calls in this scope is left out, since a trace serves many calls.
        """
        decision, operator = self.decision, self.operator

        def none_fits(*args: Any, **kwargs: Any) -> Any:
            raise NotSupported(f"no implementation of '{decision.op_name}' fits these arguments")

        if view is not None and operator is not None and decision.candidates:
            whole = Convention(takes=tuple(operator.parameters), defaults=False)
            return generated.direct(operator, decision.candidates[0], whole, self.form, view, none_fits, ask=False)
        function: Function = none_fits
        for impl in reversed(candidates):
            if not self.state.failures.kinds(impl, decision.scope):
                first = self.direct(impl, impl.fn, function)
                if is_elsewhere(impl):
                    function = _on_its_devices(impl, operator.hints if operator else (), first, function)
                else:
                    function = first if function is none_fits else _or_next(first, function)
        return function

    def once_tried(self, impls: Sequence[OpImpl], inline: Function) -> Function:
        """Return the function that Dynamo traces if implementations do not say whether it can trace them.

        The function runs ``inline`` if all can be traced, else the view. The trial runs, and the view is made, when
        Dynamo first reaches the function.
        """
        by_view: list[Function] = []

        def is_opaque() -> bool:
            if not any([trial.obstacle(self.state, impl) for impl in impls]):  # noqa: C419  (each, in any process)
                return False
            if not by_view:
                assert self.operator is not None
                by_view.append(self.traced(self._view(self.operator), self.decision.candidates))
            return True

        is_opaque._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo runs it at trace time

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if is_opaque():
                return by_view[0](*args, **kwargs)
            return inline(*args, **kwargs)

        return chosen


def _on_its_devices(impl: OpImpl, hints: Sequence[str], first: Function, other: Function) -> Function:
    """Return ``first`` for tensors on the implementation's devices, which a trace knows, and ``other`` elsewhere."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensor = leading_tensor((*args, *(value for name, value in kwargs.items() if name not in hints)))
        fits = impl.takes_device("none" if tensor is None else tensor.device.type)
        return first(*args, **kwargs) if fits else other(*args, **kwargs)

    return chosen


def _or_next(first: Function, other: Function) -> Function:
    """Return ``first``, falling back to ``other`` if it declines while it is traced."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            return first(*args, **kwargs)
        except NotSupported:
            return other(*args, **kwargs)

    return chosen


def undeclared(state: State, impls: Iterable[OpImpl], operator: Operator | None) -> list[OpImpl]:
    """Return implementations that do not say whether Dynamo can trace them, if that makes a difference."""
    if operator is None or operator.samples is None or state.view is None:
        return []
    return [impl for impl in impls if impl.opaque is None] if {Mode.INLINE, Mode.OPAQUE} <= operator.modes else []


def untried(state: State, impls: Iterable[OpImpl], operator: Operator | None) -> list[OpImpl]:
    """Return the implementations without a trial so far."""
    return [impl for impl in undeclared(state, impls, operator) if state.traces.obstacle(impl) is None]


def with_other_trace(fn: Function, traced: Function) -> Function:
    """Give callers ``fn``, and Dynamo ``traced`` in its place.

    The result is a copy of ``fn`` if Dynamo would trace into it, so that a call costs no more than before.
    """
    if isinstance(fn, types.MethodType) and _is_traced_into(fn.__func__):

        def with_self(_self: Any, *args: Any, **kwargs: Any) -> Any:
            return traced(*args, **kwargs)

        return types.MethodType(_copy(fn.__func__, with_self), fn.__self__)
    if _is_traced_into(fn):
        return _copy(fn, traced)

    def either(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else fn(*args, **kwargs)

    return either


def _is_traced_into(fn: Any) -> bool:
    """Whether a function is written in Python, outside the modules that Dynamo handles specially."""
    return isinstance(fn, types.FunctionType) and not fn.__code__.co_filename.startswith(_HANDLED_BY_DYNAMO)


def _copy(fn: Any, traced: Function) -> Function:
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__, copy.__qualname__, copy.__doc__ = fn.__kwdefaults__, fn.__qualname__, fn.__doc__
    copy._torchdynamo_inline = traced  # type: ignore[attr-defined]  # what Dynamo looks into in place of it
    return copy
