"""Find the origin of numbers that are not finite: the first call that made NaN or infinity from finite arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..knowledge.error_kinds import is_capturing
from ..locking import writers
from ..ops import OPERATORS, Access, Operator
from ..ops.results import flat
from ..run.arguments import Call
from ..run.table import MADE_FROM
from ..selection.decision import Decision
from ..state import State
from ..types import OpImpl
from .calls import call_of, declared

CACHES = "_cache"
"""Suffix of the names of caches, which may hold any values of earlier requests."""


class Origin(NamedTuple):
    """The call where numbers stopped being finite: an operator, the id of its implementation, and the layer."""

    operator: str
    implementation: str
    layer: str

    def __str__(self) -> str:
        return f"'{self.operator}' by '{self.implementation}'" + (f" in {self.layer}" if self.layer else "")


@contextmanager
def watching(state: State) -> Iterator[list[Origin]]:
    """Check the arguments and results of every call in the block; the list gets the origin once it is found.

    While dispatch is frozen, only calls of operators that were bound in the block are checked. Each call waits for the
    device.
    """
    found: list[Origin] = []
    with writers:
        before, state.wrapper = state.wrapper, partial(_watched, state, found)
        state.changed(None)
    try:
        yield found
    finally:
        with writers:
            state.wrapper = before
            state.changed(None)


def is_watching(state: State) -> bool:
    """Whether the arguments and results of calls are checked."""
    return isinstance(state.wrapper, partial) and state.wrapper.func is _watched


def _watched(
    state: State,
    found: list[Origin],
    impl: OpImpl,
    decision: Decision,
    scope: str | None,
    fn: Callable[..., Any],
) -> Callable[..., Any]:
    """Return what stands in the table for an implementation, see :attr:`fl_dispatch.state.State.wrapper`."""
    if (known := declared(state, impl)) is None:
        return fn
    operator, convention = known

    def watched(*args: Any, **kwargs: Any) -> Any:
        if found or is_capturing():
            return fn(*args, **kwargs)
        call = call_of(operator, convention, scope, args, kwargs)
        sound = not any(map(_is_damaged, _read(operator, call)))
        result = fn(*args, **kwargs)
        if sound and not found and not all(map(_is_finite, _made(operator, call, result))):
            found.append(Origin(impl.op_name, impl.impl_id, scope or ""))
        return result

    watched.__dict__[MADE_FROM] = decision
    return watched


def reads_cache(op_name: str) -> bool:
    """Whether an operator reads a cache, the values of which no call checks."""
    return any(name.endswith(CACHES) for name in OPERATORS[op_name].parameters)


def _read(operator: Operator, call: Call) -> Iterable[Any]:
    """Return the arguments that a call reads, except caches."""
    written = operator.written(call.args)
    kept = {name for name, (access, _) in written.items() if access is not Access.UPDATE}
    return [value for name, value in call.values.items() if name not in kept and not name.endswith(CACHES)]


def _made(operator: Operator, call: Call, result: Any) -> Sequence[Any]:
    """Return the results of a call, and all that it wrote."""
    made = [*flat(result), *(one for access, one in operator.written(call.args).values() if access is not Access.STATE)]
    if operator.small_state is not None and call.holds_state():
        made += operator.small_state.written(*operator.operands(call.args))
    return made


def _wide(value: Any) -> Tensor | None:
    """Return a tensor with numbers that may be infinite, 8-bit formats in a wider dtype; ``None`` for other values."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return None
    return value if value.dtype.itemsize > 1 else value.float()


def _is_damaged(value: Any) -> bool:
    """Whether an argument has NaN or infinity; negative infinity may be a mask."""
    wide = _wide(value)
    return wide is not None and not bool((wide < torch.inf).all())


def _is_finite(value: Any) -> bool:
    wide = _wide(value)
    return wide is None or bool(wide.isfinite().all())
