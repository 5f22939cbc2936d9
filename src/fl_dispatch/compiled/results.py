"""The results of an opaque view: as declared, in new memory, or in the arguments to which they belong."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import BrokenPromiseError
from ..ops import Operator
from ..ops.results import broken_promise, without_data
from ..run.table import Plan
from ..state import State
from .overlap import overlap

KEPT_PROMISES = 4096
"""Kinds of arguments for which a view remembers the promised results."""


def described(result: Any) -> tuple[Any, ...]:
    """Return shape and dtype of each result, by which compiled code reads its memory."""
    if isinstance(result, Tensor):
        return ((result.shape, result.dtype),)
    return tuple((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in result)


def promised(
    operator: Operator, args: tuple[Any, ...], kind: tuple[Any, ...], promises: dict[tuple[Any, ...], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Return the shapes and dtypes that the declaration promises for arguments of this kind."""
    assert operator.fake is not None
    if len(promises) >= KEPT_PROMISES:
        promises.clear()
    promise = promises[kind] = described(operator.fake(*map(without_data, args)))
    return promise


def broken(operator: Operator, plan: Plan, state: State, args: tuple[Any, ...], result: Any) -> BrokenPromiseError:
    """Return the error for results that break a promise to compiled code; it names the possible implementations."""
    branch = plan.decision.branch_for(operator.workload(*args))
    names = " or ".join(impl.impl_id for impl in state.reachable(plan.decision, branch))
    problem = broken_promise(operator, args, result)
    return BrokenPromiseError(f"{names} of {operator.name}: {problem}; compiled code would read its memory wrongly")


def store(targets: tuple[Tensor | None, ...], result: Any) -> tuple[Any, ...]:
    """Write the first results into the arguments to which they belong; return the rest."""
    pending = list(result) if isinstance(result, tuple) else [result]
    written = [target for target in targets if target is not None]
    if any(overlap(one, other) for index, one in enumerate(written) for other in written[:index]):
        raise ValueError("the arguments that this operator writes share memory, so they cannot hold different results")
    for index, target in enumerate(targets):
        value = pending[index]
        if target is None or value is target:
            continue
        for later in range(index + 1, len(pending)):  # a later result may share memory with this argument
            if isinstance(pending[later], Tensor) and _storage(pending[later]) == _storage(target):
                pending[later] = pending[later].clone()
        target.copy_(value)
    return tuple(pending[len(targets) :])


def fresh(inputs: tuple[Tensor | None, ...], result: Any, weights: tuple[Tensor | None, ...] = ()) -> Any:
    """Return the results, copied if they share memory with an input or with another result.

    Addresses of ``weights`` are not read, because the weights would be prepared anew (:mod:`fl_dispatch.weight_forms`).
    """
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    if not results:
        return None
    taken = {_storage(value) for value in inputs if value is not None}
    kept = {value.untyped_storage()._cdata for value in weights if value is not None}
    fresh = []
    for value in results:
        own = value
        if isinstance(value, Tensor) and value.numel():
            if value.untyped_storage()._cdata in kept or _storage(value) in taken:
                own = value.clone()
            own = own.contiguous()
            taken.add(_storage(own))
        fresh.append(own)
    return fresh[0] if len(fresh) == 1 else tuple(fresh)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
