"""Make table entries from decisions: the bare implementation unless other work must come before it.

Layers share the parts that do not depend on the layer. A decision without rules for single layers is made once for all
scopes of an operator, and so is the function that compiled code traces. Policies with equal decisions for an operator
share its entries, so a policy for each tenant costs a table of references and no functions of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..errors import NoImplementationError
from ..knowledge.failures import ArgumentKind
from ..ops import OPERATORS, Access, Operator
from ..ops.declaration import leading_tensor
from ..selection.decision import Branch, Decision, admits
from ..settings.selection_policy import SelectionPolicy
from ..state import Function, State, is_elsewhere
from ..types import OpImpl
from . import recovery
from .arguments import Call
from .keys import BOUND, CALL, LAYER, Key
from .recovery import FinalError, LaterError
from .table import MADE_FROM, Plan
from .traced import Site, undeclared, untried, with_other_trace


class Shared:
    """The recipes of all tables of a manager; each lives as long as a table uses it."""

    def __init__(self) -> None:
        self._by_operator: dict[str, MutableMapping[Any, _Recipe]] = {}

    def of(self, op_name: str) -> MutableMapping[Any, _Recipe]:
        """Return the recipes of one operator, keyed by all their inputs."""
        return self._by_operator.setdefault(op_name, WeakValueDictionary())

    def forget(self, op_names: Iterable[str] | None) -> None:
        """Drop the recipes of some operators, or of all, so that they are rebuilt."""
        for op_name in [*self._by_operator] if op_names is None else op_names:
            self._by_operator.pop(op_name, None)


def build(
    state: State, policy: SelectionPolicy, keys: Iterable[Key], recipes: dict[Any, Any], shared: Shared
) -> dict[str, Plan]:
    """Return the plans for some keys under one policy; an operator without a registered implementation has none.

    ``recipes`` are those of the last call with the same state and policy, or none, and are updated. ``shared`` has the
    recipes of other policies with the same state.
    """
    singled_out = {key.partition("@")[0] for key, _ in (*policy.per_op_order, *policy.op_tuned) if "@" in key}
    plans = {}
    for key in keys:
        apart = key.op_name in singled_out or state.failures.has_bans(key.op_name)
        group = key.scope if apart or key.scope is None else ANY_LAYER
        place = key.op_name, key.form, group
        if place not in recipes:
            others = {} if key.op_name in singled_out else shared.of(key.op_name)
            recipes[place] = _recipe(state, policy, key, key.scope if apart else None, others)
        if (recipe := recipes[place]) is not None:
            if (plan := recipe.plans.get(key.scope)) is None:
                decision, entry = recipe.site.decision, _entry(recipe, key.scope)
                plan = recipe.plans[key.scope] = Plan(key.op_name, key.scope, decision, entry, recipe.declined)
            plans[key.text] = plan
    return plans


def frozen_function(state: State, policy: SelectionPolicy, decision: Decision) -> Function:
    """Return the implementation of an unconditional choice, as a function for a bound operator's callers."""
    operator, first = OPERATORS[decision.op_name], decision.candidates[0]
    site = Site(state, policy, decision, operator, CALL)
    view = site.needed_view()
    function = site.direct(first, first.fn, first.fn, view=view)
    if view is not None or not untried(state, [first], operator):
        return function
    return with_other_trace(function, site.once_tried([first], function))


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Recipe:
    """The part of an entry that several layers and policies share.

    Args:
        site: the decision, and the form of call.
        view: the opaque view that compiled code calls instead of tracing the choice.
        undeclared: implementations that a trial must check, because they do not say whether Dynamo can trace them.
        traced: the function that Dynamo traces in place of the careful path.
        declined: the function with which a trace goes on if the first candidate declines.
        plans: layer → the plan of its entry.
    """

    site: Site
    view: Function | None
    undeclared: list[OpImpl]
    traced: Function
    declined: Function
    plans: dict[str | None, Plan] = field(default_factory=dict)


ANY_LAYER = ""
"""Stands for every layer without a rule of its own."""


def _recipe(
    state: State, policy: SelectionPolicy, key: Key, scope: str | None, others: MutableMapping[Any, _Recipe]
) -> _Recipe | None:
    """Return the recipe for a key, possibly one of ``others``: entries read only ``strict`` of the policy itself."""
    try:
        decision = state.decide(key.op_name, scope, policy)
    except NoImplementationError:
        return None
    same = key.form, scope, policy.strict, state.wrapper, *_parts(decision)
    if (recipe := others.get(same)) is None:
        others[same] = recipe = _new_recipe(state, policy, key, decision)
    return recipe


def _parts(decision: Decision) -> tuple[Any, ...]:
    """Return what entries read of a decision."""
    return decision.branches, tuple(decision.refusals.items()), tuple(decision.notes.items())


def _new_recipe(state: State, policy: SelectionPolicy, key: Key, decision: Decision) -> _Recipe:
    """Make the recipe of a decision in a key's form of call."""
    operator = OPERATORS.get(key.op_name)
    site = Site(state, policy, decision, operator, key.form)
    view = site.needed_view()
    traced = site.traced(view, decision.candidates)
    others = () if policy.strict or state.frozen else decision.candidates[1:]
    declined = site.traced(None, others)
    new = undeclared(state, site.reachable(), operator) if view is None else []
    if new:
        traced = site.once_tried(new, traced)
    if rest := undeclared(state, others, operator):
        declined = site.once_tried(rest, declined)
    return _Recipe(site, view, new, traced, declined)


def _entry(recipe: _Recipe, scope: str | None) -> Function:
    """Return the table's function for one layer, or for calls by name."""
    site, careful = recipe.site, _careful(recipe, scope)
    if not site.decision.conditional:
        return _first_candidate(recipe, site, site.decision.branches[-1], scope, careful, recipe.view)
    if site.operator is None or site.form == LAYER:
        return careful
    return _conditional(recipe, site.operator, scope, careful)


def _first_candidate(
    recipe: _Recipe,
    site: Site,
    branch: Branch,
    scope: str | None,
    careful: Function,
    view: Function | None,
    later: bool = False,
) -> Function:
    """Return the first candidate with its guards once it is proven; until then, the careful path.

    While dispatch is frozen it need not be proven: its failure is raised, so nothing has to be restored. A call that it
    declines goes to the next candidate under the same rules.
    """
    if not branch.candidates:
        return careful
    first, state, operator, decision = branch.candidates[0], site.state, site.operator, site.decision
    if is_elsewhere(first):
        return careful
    unproven = _unproven(state, first, operator, later)
    following = _next_candidate(recipe, site, branch, scope, careful)
    if unproven is None and following is careful:
        return careful
    fn = state.counter.function(first)
    if state.wrapper is not None:
        fn = state.wrapper(first, decision, scope, fn)
    entry = site.direct(first, fn, careful, unproven, view, following)
    if recipe.undeclared:
        entry = with_other_trace(entry, site.once_tried(recipe.undeclared, entry))
    if entry is not fn:
        entry.__dict__[MADE_FROM] = decision
    banned = state.failures.kinds(first, decision.scope)
    if not banned:
        return entry
    if operator is None or site.form == LAYER:
        return careful
    return _kind_checked(operator, decision.scope, banned, entry, careful, recipe.traced)


def _unproven(state: State, impl: OpImpl, operator: Operator | None, later: bool) -> Sequence[str] | None:
    """Return optional parameters that make a call write arguments for which an implementation is not proven.

    ``None`` means that it is not proven at all, or watched. While dispatch is frozen nothing has to be proven, but the
    first result of a ``later`` candidate, which may never have run before, is compared with the declaration.
    """
    proofs = state.proofs
    succeeded = proofs.holds(impl, wrote=True) or proofs.holds(impl, wrote=False)
    if state.frozen:
        return () if succeeded or not later else None
    if proofs.watches(impl):
        return None
    if proofs.holds(impl, wrote=True):
        return ()
    if not succeeded or operator is None:
        return None
    given = [write.given for write in operator.writes.values() if write.access is Access.UPDATE]
    return None if None in given else list(dict.fromkeys(name for name in given if name is not None))


def _next_candidate(recipe: _Recipe, site: Site, branch: Branch, scope: str | None, careful: Function) -> Function:
    """Return the function for calls that the first candidate declines: the next one, or the careful path."""
    first, *rest = branch.candidates
    convention = site.state.registry.convention(first)
    if first.supports is None and not (convention and convention.left_out):
        return careful  # the first candidate takes every call
    others = replace(branch, candidates=tuple(rest))
    entry = _first_candidate(recipe, site, others, scope, careful, None, later=True)
    if entry is careful:
        return careful
    impl = rest[0]

    def next_candidate(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return careful(*args, **kwargs)  # a trace has its own form of this
        if impl.device_types is not None:
            tensor = leading_tensor((*args, *kwargs.values()))
            if not impl.takes_device("none" if tensor is None else tensor.device.type):
                return careful(*args, **kwargs)
        try:
            return entry(*args, **kwargs)
        except (FinalError, LaterError):
            raise
        except Exception as error:
            failure = LaterError(error, impl)
        try:
            raise failure
        finally:
            del failure, args, kwargs  # the error's traceback holds this frame

    return next_candidate


def _kind_checked(
    operator: Operator,
    scope: str | None,
    banned: frozenset[ArgumentKind],
    entry: Function,
    careful: Function,
    traced: Function,
) -> Function:
    """Return an entry with an implementation that is banned for some kinds of arguments."""

    def kind_checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        full = operator.bind(args, kwargs) if kwargs else args
        chosen = careful if ArgumentKind.of(operator.operands(full), scope) in banned else entry
        return chosen(*args, **kwargs)

    kind_checked.__dict__.update(entry.__dict__ if hasattr(entry, MADE_FROM) else {})
    return kind_checked


def _conditional(recipe: _Recipe, operator: Operator, scope: str | None, careful: Function) -> Function:
    """Return an entry that runs the first branch with a rule that the call meets; the last branch has no rule."""
    site = replace(recipe.site, form=BOUND)  # all arguments are passed
    branches = [
        (branch.rule, _first_candidate(recipe, site, branch, scope, careful, None)) for branch in site.decision.branches
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

    conditional.__dict__[MADE_FROM] = site.decision
    return conditional


def _careful(recipe: _Recipe, scope: str | None) -> Function:
    """Return the path of first calls, watched and banned implementations, and calls that the first one declines."""
    site, traced = recipe.site, recipe.traced
    state, policy, decision = site.state, site.policy, site.decision

    def careful(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        call = Call.of(decision.op_name, scope, args, kwargs)
        try:
            return recovery.run(state, policy, decision, call)
        except Exception as error:
            final = FinalError(error)
        try:
            raise final
        finally:
            del final, call, args, kwargs  # the error's traceback holds this frame

    return careful
