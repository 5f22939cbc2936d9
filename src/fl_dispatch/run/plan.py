"""Makes table entries from decisions: the bare implementation wherever nothing has to happen before it.

Layers share what does not depend on the layer: a decision that no rule for single layers touches is made once for all
scopes of an operator, and so is what compiled code traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import NoImplementationError, NotSupported
from ..knowledge.failures import ArgumentKind
from ..ops import OPERATORS, Access, Operator
from ..selection.decision import Branch, Decision, admits
from ..settings.selection_policy import SelectionPolicy
from ..state import State, is_elsewhere
from ..types import OpImpl
from . import generated, recovery, shadow
from .arguments import Call
from .keys import BOUND, CALL, LAYER, Key
from .recovery import Settled
from .table import MADE_FROM, Plan
from .traced import Function, once_tried, traced_of, undeclared, untried, view_of, with_other_trace


def build(
    state: State, policy: SelectionPolicy, keys: Iterable[Key], recipes: dict[Any, Any] | None = None
) -> dict[str, Plan]:
    """The plans for some keys under one policy; an operator that nobody registered (any more) has none.

    ``recipes`` are those of the last call with the same state and policy, and get the new ones.
    """
    recipes = {} if recipes is None else recipes
    singled_out = {key.partition("@")[0] for key, _ in (*policy.per_op_order, *policy.op_tuned) if "@" in key}
    plans = {}
    for key in keys:
        apart = key.op_name in singled_out or state.failures.has_bans(key.op_name)
        group = key.scope if apart or key.scope is None else ANY_LAYER
        place = key.op_name, key.form, group
        if place not in recipes:
            recipes[place] = _recipe(state, policy, key, key.scope if apart else None)
        if (recipe := recipes[place]) is not None:
            entry = _entry(state, policy, recipe, key)
            plans[key.text] = Plan(key.op_name, key.scope, recipe.decision, entry, recipe.declined)
    return plans


def direct_function(state: State, impl: OpImpl) -> Function:
    """One implementation as a function with the operator's parameters, without fallback; ``supports`` is not asked."""

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        raise NotSupported(f"'{impl.impl_id}' of '{impl.op_name}' does not take all of these parameters")

    operator = OPERATORS.get(impl.op_name)
    convention = state.registry.convention(impl)
    return generated.direct(operator, impl, convention, CALL, impl.fn, otherwise, ask=False)


def direct_refusal(state: State, impl: OpImpl, args: Sequence[Any]) -> str:
    """Why an implementation declines the operator's arguments, as a call finds it; empty when it takes them.

    Raises:
        Exception: whatever its ``supports`` raises.
    """
    call = Call(impl.op_name, None, tuple(args), {})
    return call.refusal(impl, state.registry.convention(impl))


def frozen_function(state: State, policy: SelectionPolicy, decision: Decision) -> Function:
    """The implementation of an unconditional choice, as a function for a bound operator's callers."""
    operator, first = OPERATORS[decision.op_name], decision.candidates[0]
    view = view_of(state, policy, decision, operator)
    convention = state.registry.convention(first)
    function = generated.direct(operator, first, convention, CALL, first.fn, first.fn, view=view)
    if view is not None or not untried(state, [first], operator):
        return function
    tried = once_tried(state, policy, decision, operator, CALL, [first], function)
    return with_other_trace(function, tried)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The common part of several layers' entries.

    Args:
        operator: the declaration; ``None`` for an operator that nobody declared.
        decision: who may run, best first.
        view: what compiled code calls instead of tracing into the choice.
        undeclared: those of which a trace finds out whether Dynamo can trace them.
        traced: what Dynamo traces in place of the careful path.
        declined: what a trace goes on with when the first candidate declines.
    """

    operator: Operator | None
    decision: Decision
    view: Function | None
    undeclared: list[OpImpl]
    traced: Function
    declined: Function


ANY_LAYER = ""
"""Stands for every layer that nothing singles out."""


def _recipe(state: State, policy: SelectionPolicy, key: Key, scope: str | None) -> _Recipe | None:
    try:
        decision = state.decide(key.op_name, scope, policy)
    except NoImplementationError:
        return None
    operator = OPERATORS.get(key.op_name)
    view = view_of(state, policy, decision, operator)
    traced = traced_of(state, decision, operator, key.form, view, decision.candidates)
    others = () if policy.strict or state.frozen else decision.candidates[1:]
    declined = traced_of(state, decision, operator, key.form, None, others)
    new = undeclared(state, state.who_may_run(decision, decision.branches[-1]), operator) if view is None else []
    if new and operator is not None:
        traced = once_tried(state, policy, decision, operator, key.form, new, traced)
    if operator is not None and (rest := undeclared(state, others, operator)):
        declined = once_tried(state, policy, decision, operator, key.form, rest, declined)
    return _Recipe(operator, decision, view, new, traced, declined)


def _entry(state: State, policy: SelectionPolicy, recipe: _Recipe, key: Key) -> Function:
    decision, operator = recipe.decision, recipe.operator
    careful = _careful(state, policy, recipe, key)
    if not decision.conditional:
        return _first_candidate(state, policy, recipe, decision.branches[-1], key, careful, recipe.view)
    if operator is None or key.form == LAYER:
        return careful
    return _conditional(state, policy, recipe, operator, key, careful)


def _first_candidate(
    state: State,
    policy: SelectionPolicy,
    recipe: _Recipe,
    branch: Branch,
    key: Key,
    careful: Function,
    view: Function | None,
) -> Function:
    """The first candidate itself once it is proven, guarded by what it asks for; until then the careful path.

    While dispatch is frozen it need not be proven: its failure is raised, so nothing has to be restored.
    """
    if not branch.candidates:
        return careful
    first, operator, decision = branch.candidates[0], recipe.operator, recipe.decision
    form = BOUND if decision.conditional else key.form
    if is_elsewhere(first):
        return careful
    unproven: list[str] = []
    if not state.frozen:
        proofs = state.proofs
        if proofs.watches(first):
            return careful
        if not proofs.holds(first, wrote=True):
            if not proofs.holds(first, wrote=False) or operator is None:
                return careful
            updates = [write for write in operator.writes.values() if write.access is Access.UPDATE]
            if any(write.given is None for write in updates):
                return careful
            unproven = list(dict.fromkeys(write.given for write in updates if write.given is not None))
    convention = state.registry.convention(first)
    fn = state.counter.function(first)
    if state.sampling is not None:
        fn = shadow.watched(state, first, decision, key.scope, fn)
    entry = generated.direct(operator, first, convention, form, fn, careful, unproven, view=view)
    if recipe.undeclared and operator is not None:
        tried = once_tried(state, policy, decision, operator, form, recipe.undeclared, entry)
        entry = with_other_trace(entry, tried)
    if entry is not fn:
        entry.__dict__[MADE_FROM] = decision
    banned = state.failures.kinds(first, decision.scope)
    if not banned:
        return entry
    if operator is None or form == LAYER:
        return careful
    return _kind_checked(operator, decision.scope, banned, entry, careful, recipe.traced)


def _kind_checked(
    operator: Operator,
    scope: str | None,
    banned: frozenset[ArgumentKind],
    entry: Function,
    careful: Function,
    traced: Function,
) -> Function:
    """An entry whose implementation is banned for some kinds of arguments."""

    def kind_checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        full = operator.bind(args, kwargs) if kwargs else args
        chosen = careful if ArgumentKind.of(operator.operands(full), scope) in banned else entry
        return chosen(*args, **kwargs)

    kind_checked.__dict__.update(entry.__dict__ if hasattr(entry, MADE_FROM) else {})
    return kind_checked


def _conditional(
    state: State, policy: SelectionPolicy, recipe: _Recipe, operator: Operator, key: Key, careful: Function
) -> Function:
    branches = [
        (branch.rule, _first_candidate(state, policy, recipe, branch, key, careful, None))
        for branch in recipe.decision.branches
    ]
    count = len(operator.parameters)
    traceable, traced = recipe.view is None, recipe.traced

    def conditional(*args: Any, **kwargs: Any) -> Any:
        if not traceable and torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        full = operator.bind(args, kwargs) if kwargs or len(args) < count else args
        workload = operator.workload(*full)
        for rule, entry in branches:
            if rule is None or admits(rule, workload):
                return entry(*full)
        raise AssertionError("the last branch has no condition")

    conditional.__dict__[MADE_FROM] = recipe.decision
    return conditional


def _careful(state: State, policy: SelectionPolicy, recipe: _Recipe, key: Key) -> Function:
    """The path of a first call, of watched and banned implementations, and of calls that the first one refuses."""
    op_name, scope, decision, traced = key.op_name, key.scope, recipe.decision, recipe.traced

    def careful(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        call = Call.of(op_name, scope, args, kwargs)
        try:
            return recovery.run(state, policy, decision, call)
        except Exception as error:
            settled = Settled(error)
        try:
            raise settled
        finally:
            del settled, call, args, kwargs  # the error's traceback holds this frame

    return careful
