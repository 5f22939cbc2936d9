"""Makes table entries from decisions: the bare implementation wherever nothing has to happen before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import entries, opaque, recovery
from .call import Call
from .device import detect_device
from .errors import NoImplementationError, NotSupported
from .failures import ArgumentKind
from .ops import OPERATORS, Access, Mode, Operator
from .ops.declaration import leading_tensor
from .recovery import Settled
from .selection import Branch, Decision, admits
from .signatures import Convention
from .table import ROOT, Built
from .types import OpImpl

if TYPE_CHECKING:
    from .op_manager import OpManager
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
        keys.append(Key(f"{op_name}{entries.LAYER_SUFFIX}", op_name, None, entries.LAYER))
    return keys + [bound_key(op_name, scope) for scope in sorted(scopes)]


def bound_key(op_name: str, scope: str) -> Key:
    """The entry of a bound operator."""
    return Key(f"{op_name}@{scope}", op_name, scope or None, entries.BOUND)


def build_entries(manager: OpManager, policy: SelectionPolicy, keys: Iterable[Key]) -> Built:
    """The functions for some keys under one policy, and the decisions that they were made from."""
    built = Built({}, {}, {})
    for key in keys:
        try:
            decision = manager.decide(key.op_name, key.scope, policy)
        except NoImplementationError:  # nobody registered it (any more)
            continue
        built.decisions[key.text] = decision
        built.entries[key.text] = _entry(manager, policy, decision, key.form)
        operator = OPERATORS.get(key.op_name)
        others = () if policy.strict or manager.frozen else decision.candidates[1:]
        built.declined[key.text] = _traced(manager, decision, operator, key.form, None, others)
    return built


def direct_function(manager: OpManager, impl: OpImpl) -> Function:
    """One implementation as a function with the operator's parameters: no fallback, ``supports`` is not asked."""

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        raise NotSupported(f"'{impl.impl_id}' of '{impl.op_name}' does not take all of these parameters")

    operator = OPERATORS.get(impl.op_name)
    convention = manager.registry.convention(impl)
    return entries.direct(operator, impl, convention, entries.CALL, impl.fn, otherwise, ask=False)


def frozen_function(manager: OpManager, policy: SelectionPolicy, decision: Decision) -> Function:
    """The implementation of an unconditional choice, as a function for a bound operator's callers."""
    operator, first = OPERATORS[decision.op_name], decision.candidates[0]
    view = _view(manager, policy, decision, operator)
    convention = manager.registry.convention(first)
    return entries.direct(operator, first, convention, entries.CALL, first.fn, first.fn, view=view)


def _entry(manager: OpManager, policy: SelectionPolicy, decision: Decision, form: str) -> Function:
    operator = OPERATORS.get(decision.op_name)
    view = _view(manager, policy, decision, operator)
    traced = _traced(manager, decision, operator, form, view, decision.candidates)
    careful = _careful(manager, policy, decision, form, traced)
    if not decision.conditional:
        return _first_candidate(manager, decision, decision.branches[-1], form, careful, traced, view)
    if operator is None or form == entries.LAYER:
        return careful
    return _conditional(manager, decision, operator, careful, traced, view)


def _first_candidate(
    manager: OpManager,
    decision: Decision,
    branch: Branch,
    form: str,
    careful: Function,
    traced: Function,
    view: Function | None,
) -> Function:
    """The first candidate itself once it is proven, guarded by what it asks for; until then the careful path.

    While dispatch is frozen it need not be proven: its failure is raised, so nothing has to be restored.
    """
    if not branch.candidates:
        return careful
    first, operator = branch.candidates[0], OPERATORS.get(decision.op_name)
    if _is_elsewhere(first):
        return careful
    unproven: list[str] = []
    if not manager.frozen:
        proofs = manager.proofs
        if proofs.watches(first):
            return careful
        if not proofs.holds(first, wrote=True):
            if not proofs.holds(first, wrote=False) or operator is None:
                return careful
            updates = [write for write in operator.writes.values() if write.access is Access.UPDATE]
            if any(write.given is None for write in updates):
                return careful
            unproven = list(dict.fromkeys(write.given for write in updates if write.given is not None))
    convention = manager.registry.convention(first)
    fn = manager.counter.function(first)
    entry = entries.direct(operator, first, convention, form, fn, careful, unproven, view=view)
    banned = manager.failures.kinds(first, decision.scope)
    if not banned:
        return entry
    if operator is None or form == entries.LAYER:
        return careful
    return _kind_checked(operator, decision.scope, banned, entry, careful, traced)


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
        chosen = careful if ArgumentKind.of(full, scope) in banned else entry
        return chosen(*args, **kwargs)

    kind_checked.__dict__.update(getattr(entry, "__dict__", {}))
    return kind_checked


def _conditional(
    manager: OpManager,
    decision: Decision,
    operator: Operator,
    careful: Function,
    traced: Function,
    view: Function | None,
) -> Function:
    branches = [
        (branch.rule, _first_candidate(manager, decision, branch, entries.BOUND, careful, traced, None))
        for branch in decision.branches
    ]
    count = len(operator.parameters)
    traceable = view is None

    def conditional(*args: Any, **kwargs: Any) -> Any:
        if not traceable and torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        full = operator.bind(args, kwargs) if kwargs or len(args) < count else args
        workload = operator.workload(*full)
        for rule, entry in branches:
            if rule is None or admits(rule, workload):
                return entry(*full)
        raise AssertionError("the last branch has no condition")

    conditional.__dict__["fl_decision"] = decision  # so that recovery knows which branch ran
    return conditional


def _careful(manager: OpManager, policy: SelectionPolicy, decision: Decision, form: str, traced: Function) -> Function:
    """The path of a first call, of watched and banned implementations, and of calls that the first one refuses."""
    op_name, scope = decision.op_name, decision.scope

    def careful(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        call = Call.of(op_name, scope, args, kwargs)
        try:
            return recovery.run(manager, policy, decision, call)
        except Exception as error:
            settled = Settled(error)
        try:
            raise settled
        finally:
            del settled, call, args, kwargs  # the error's traceback holds this frame

    return careful


def who_may_run(manager: OpManager, decision: Decision, branch: Branch, bans: bool = True) -> list[OpImpl]:
    """A branch's candidates up to the first one that takes every call."""
    runs = []
    for impl in branch.candidates:
        runs.append(impl)
        if takes_every_call(manager, decision, impl, bans):
            break
    return runs


def takes_every_call(manager: OpManager, decision: Decision, impl: OpImpl, bans: bool = True) -> bool:
    """Whether an implementation takes every call here: its device, no predicate, no ban, no parameter left out."""
    convention = manager.registry.convention(impl)
    banned = bans and manager.failures.kinds(impl, decision.scope)
    whole = impl.supports is None and not (convention and convention.left_out)
    return whole and not banned and not _is_elsewhere(impl)


def _is_elsewhere(impl: OpImpl) -> bool:
    """Whether tensors of this machine's device are not for it, so that each call has to be looked at."""
    return impl.device_types is not None and not impl.takes_device(detect_device().torch_type)


def _view(
    manager: OpManager, policy: SelectionPolicy, decision: Decision, operator: Operator | None
) -> Function | None:
    """The opaque view that compiled code calls instead of tracing into the choice; ``None`` where it may look inside.

    A view is needed where a trace cannot hold the choice: Dynamo cannot trace what may run, the operator may not be
    traced, the choice depends on the call, or dispatch is frozen, so that the guards of a predicate may be dropped.
    """
    if operator is None or Mode.OPAQUE not in operator.modes or manager.tables.root is not ROOT:
        return None
    runs = who_may_run(manager, decision, decision.branches[-1])
    needed = (
        decision.conditional
        or Mode.INLINE not in operator.modes
        or any(impl.opaque for impl in runs)
        or (manager.frozen and len(runs) > 1)
    )
    if not needed:
        return None
    # The layer's name would make every layer's graph another one, so it stands there only where a rule needs it.
    scope = decision.scope
    banned_here = any(manager.failures.kinds(impl, scope) != manager.failures.kinds(impl, None) for impl in runs)
    return opaque.view(operator, scope or "" if banned_here or policy.singles_out(operator.name, scope) else "")


def _traced(
    manager: OpManager,
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
        return entries.direct(operator, decision.candidates[0], whole, form, view, nobody, ask=False)
    function: Function = nobody
    for impl in reversed(candidates):
        if not manager.failures.kinds(impl, decision.scope):
            convention = manager.registry.convention(impl)
            first = entries.direct(operator, impl, convention, form, impl.fn, function)
            if _is_elsewhere(impl):
                function = _on_its_devices(impl, first, function)
            else:
                function = first if function is nobody else _or_next(first, function)
    return function


def _on_its_devices(impl: OpImpl, first: Function, other: Function) -> Function:
    """The first function for tensors on the implementation's devices, which a trace knows; the other one elsewhere."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensor = leading_tensor((*args, *kwargs.values()))
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
