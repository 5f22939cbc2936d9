"""Makes table entries from decisions: the bare implementation wherever nothing has to happen before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import entries, recovery
from .errors import NoImplementationError
from .ops import OPERATORS, Operator
from .recovery import Call, Settled
from .selection import Decision, admits
from .types import OpImpl

if TYPE_CHECKING:
    from .manager import OpManager
    from .selection_policy import SelectionPolicy

Function = Callable[..., Any]


class Key(NamedTuple):
    """One entry of a table: its key, operator, scope, and the form of call that it is for."""

    text: str
    op_name: str
    scope: str | None
    form: str


def keys_of(op_name: str, scopes: Iterable[str]) -> list[Key]:
    """The entries of one operator: by name, with a layer first, and one for each scope that was bound."""
    keys = [Key(op_name, op_name, None, entries.CALL)]
    operator = OPERATORS.get(op_name)
    if operator is not None and operator.layer is not None:
        keys.append(Key(f"{op_name}:layer", op_name, None, entries.LAYER))
    return keys + [bound_key(op_name, scope) for scope in sorted(scopes)]


def bound_key(op_name: str, scope: str) -> Key:
    """The entry of a bound operator."""
    return Key(f"{op_name}@{scope}", op_name, scope or None, entries.BOUND)


def build_entries(
    manager: OpManager, policy: SelectionPolicy, keys: Iterable[Key]
) -> tuple[dict[str, Function], dict[str, Decision]]:
    """The functions for some keys under one policy, and the decisions that they were made from."""
    functions: dict[str, Function] = {}
    decisions: dict[str, Decision] = {}
    for key in keys:
        try:
            decision = manager.decide(key.op_name, key.scope, policy)
        except NoImplementationError:  # nobody registered it (any more)
            continue
        decisions[key.text] = decision
        functions[key.text] = _entry(manager, policy, decision, key.form)
    return functions, decisions


def _entry(manager: OpManager, policy: SelectionPolicy, decision: Decision, form: str) -> Function:
    operator = OPERATORS.get(decision.op_name)
    careful = _careful(manager, policy, decision, form)
    if not decision.conditional:
        return _first_candidate(manager, decision.candidates, operator, form, careful, decision.scope)
    if operator is None or form == entries.LAYER:
        return careful
    return _conditional(manager, decision, operator, careful)


def _first_candidate(
    manager: OpManager,
    candidates: tuple[OpImpl, ...],
    operator: Operator | None,
    form: str,
    careful: Function,
    scope: str | None,
) -> Function:
    """The first candidate itself once it is proven, guarded by what it asks for; until then the careful path."""
    if not candidates:
        return careful
    first, proofs = candidates[0], manager.proofs
    if proofs.watches(first) or manager.failures.touches(first, scope):
        return careful
    unproven: list[str] = []
    if not proofs.holds(first, wrote=True):
        writes = operator.writes.values() if operator is not None else ()
        if not proofs.holds(first, wrote=False) or any(write.given is None for write in writes):
            return careful
        unproven = list(dict.fromkeys(write.given for write in writes if write.given is not None))
    convention = manager.registry.convention(first)
    return entries.direct(operator, first, convention, form, manager.counter.function(first), careful, unproven)


def _conditional(manager: OpManager, decision: Decision, operator: Operator, careful: Function) -> Function:
    branches = [
        (
            branch.rule,
            _first_candidate(manager, branch.candidates, operator, entries.BOUND, careful, decision.scope),
        )
        for branch in decision.branches
    ]
    count = len(operator.parameters)

    def conditional(*args: Any, **kwargs: Any) -> Any:
        full = operator.bind(args, kwargs) if kwargs or len(args) < count else args
        workload = operator.workload(*full)
        for rule, entry in branches:
            if rule is None or admits(rule, workload):
                return entry(*full)
        raise AssertionError("the last branch has no condition")

    return conditional


def _careful(manager: OpManager, policy: SelectionPolicy, decision: Decision, form: str) -> Function:
    """The path of a first call, of watched and partly banned implementations, and of calls that the first one
    refuses.
    """
    op_name, scope = decision.op_name, decision.scope
    operator = OPERATORS.get(op_name)

    def careful(*args: Any, **kwargs: Any) -> Any:
        layer = None
        if torch.compiler.is_dynamo_compiling():
            return _traced(manager, decision, operator, args, kwargs)
        if form == entries.LAYER and operator is not None:
            layer, kwargs = args[0], entries.from_layer(operator, args[0], args[1:], kwargs)
            args = ()
        call = Call(op_name, operator, scope, args, kwargs, layer)
        try:
            return recovery.run(manager, policy, decision, call)
        except Exception as error:
            settled = Settled(error)
        raise settled

    return careful


def _traced(
    manager: OpManager, decision: Decision, operator: Operator | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What Dynamo traces while the first candidate is unproven: that candidate, as a constant."""
    impl = decision.candidates[0]
    convention = manager.registry.convention(impl)
    return entries.direct(operator, impl, convention, entries.CALL, impl.fn, None)(*args, **kwargs)
