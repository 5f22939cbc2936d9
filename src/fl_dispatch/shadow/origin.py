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
def watching(state: State, rows: Sequence[int] = ()) -> Iterator[dict[int, Origin]]:
    """Check the arguments and results of every call in the block; each request's origin is added once it is found.

    While dispatch is frozen, operators that were bound after the freeze are not checked, unless they were bound in the
    block. Each call waits for the device.

    Args:
        state: of the manager.
        rows: the tokens of each request of the step, in their order; by default all are of one request.

    Yields:
        A request's place in ``rows`` → its origin.
    """
    found: dict[int, Origin] = {}
    with writers:
        before, state.wrapper = state.wrapper, partial(_watched, state, found, rows)
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
    found: dict[int, Origin],
    rows: Sequence[int],
    impl: OpImpl,
    decision: Decision,
    scope: str | None,
    fn: Callable[..., Any],
) -> Callable[..., Any]:
    """Return what stands in the table for an implementation, see :attr:`fl_dispatch.state.State.wrapper`."""
    if (known := declared(state, impl)) is None:
        return fn
    operator, convention = known
    requests = {*range(len(rows) or 1)}

    def watched(*args: Any, **kwargs: Any) -> Any:
        if found.keys() == requests or is_capturing():
            return fn(*args, **kwargs)
        call = call_of(operator, convention, scope, args, kwargs)
        before, _ = _places(_read(operator, call), rows, _damaged)
        result = fn(*args, **kwargs)
        after, divided = _places(_made(operator, call, result), rows, _not_finite)
        if divided or not before:
            for place in after - before - found.keys():
                found[place] = Origin(impl.op_name, impl.impl_id, scope or "")
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


def _places(values: Iterable[Any], rows: Sequence[int], is_wrong: Callable[[Tensor], Tensor]) -> tuple[set[int], bool]:
    """Return the requests with wrong numbers in these tensors, and whether each such tensor has rows of requests.

    A tensor has a row for each token, or one for each request; all requests share any other tensor.
    """
    found: set[int] = set()
    for wide in map(_wide, values):
        if wide is None or not bool((wrong := is_wrong(wide)).any()):
            continue
        by_row = wrong.flatten(1).any(1).tolist() if wrong.dim() > 1 else wrong.flatten().tolist()
        if len(by_row) == sum(rows):
            owners = [place for place, count in enumerate(rows) for _ in range(count)]
        elif len(by_row) == len(rows):
            owners = [*range(len(rows))]
        else:
            return {*range(len(rows) or 1)}, False
        found.update(owner for owner, row in zip(owners, by_row, strict=True) if row)
    return found, True


def _wide(value: Any) -> Tensor | None:
    """Return a tensor with numbers that may be infinite, 8-bit formats in a wider dtype; ``None`` for other values."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return None
    return value if value.dtype.itemsize > 1 else value.float()


def _damaged(wide: Tensor) -> Tensor:
    """Mark NaN and infinity in an argument; negative infinity may be a mask."""
    return ~(wide < torch.inf)


def _not_finite(wide: Tensor) -> Tensor:
    return ~wide.isfinite()
