"""The manager: it answers questions about operators and applies changes.

A call reads one table entry and runs it (:mod:`.calls`); any other work happens in the entry, or after an exception in
:mod:`fl_dispatch.run.recovery`. A writer (a registration, a policy change, a ban, a first success) changes the
:class:`~fl_dispatch.state.State` and then has the affected entries rebuilt.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ..compiled.freezing import Freezer
from ..errors import NoImplementationError
from ..fixed_choices import Choices
from ..global_policy import GLOBAL
from ..locking import writers
from ..ops import OPERATORS, Operator
from ..registry import OpRegistry
from ..run import generated, recovery
from ..run.arguments import Call
from ..run.direct import direct_function
from ..run.dispatch import call_through
from ..run.keeper import PrivateTable, TableKeeper
from ..run.plan import frozen_function
from ..run.table import DispatchTable, Plan
from ..selection.decision import Decision
from ..shadow.mode import Shadow
from ..state import State, unknown
from ..types import OpImpl
from . import checks
from .start import Start

managers: weakref.WeakSet[OpManager] = weakref.WeakSet()
"""All living managers."""


class OpManager:
    """Selects and calls operator implementations.

    Args:
        registry: the implementations; a new empty registry by default.
        register_builtins: register the built-in backends and discover plugins at the first use.
        root: the table for the global policy; a private one by default.
        view: the opaque view that compiled code calls, see :class:`~fl_dispatch.state.State`; only the process's
            manager has views.

    Attributes:
        state: its knowledge.
        table_keeper: the tables that calls read, kept up to date.
        freezer: freezes dispatch.
        shadow: compares live calls while shadow mode is on.
    """

    def __init__(
        self,
        registry: OpRegistry | None = None,
        *,
        register_builtins: bool = True,
        root: DispatchTable | None = None,
        view: Callable[[Operator, str], Callable[..., Any]] | None = None,
    ) -> None:
        self.state = State(OpRegistry() if registry is None else registry, self.republish, view)
        self._resolved: dict[OpImpl, Callable[..., Any]] = {}
        self.table_keeper = TableKeeper(self.state, PrivateTable(self.ensure_initialized) if root is None else root)
        self.freezer = Freezer(self.state, self.table_keeper)
        self.shadow = Shadow(self.state)
        self._start = Start(self.state, self.table_keeper, self.shadow, register_builtins)
        self.registry.add_observer(self)
        with writers:
            managers.add(self)

    # ---- calling

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operator; see :func:`fl_dispatch.call_op`."""
        return call_through(self.table_keeper.root, op_name, args, kwargs)

    def bind(self, op_name: str, scope: str | None = None) -> Callable[..., Any]:
        """Return a function that runs an operator; see :func:`fl_dispatch.bind_op`."""
        self.ensure_initialized()
        key = self.table_keeper.bind(op_name, scope or "")
        operator = OPERATORS.get(op_name)
        root = self.table_keeper.root
        if operator is None:
            return lambda *args, **kwargs: call_through(root, op_name, args, kwargs, key)
        plan = root.plans.get(key)
        watched = self.state.counter.on or self.state.wrapper is not None
        if self.frozen and plan is not None and not watched and self._fixed(plan)[0].sole:
            return frozen_function(self.state, root.policy, plan.decision)
        return generated.bound(operator, key, root, recovery.recover, unknown)

    def resolve(self, op_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return the implementation that a call would run, without fallback.

        Without arguments that is the first candidate; with arguments, the candidate that such a call would run. An
        implementation that takes a layer, or omits parameters, is wrapped in a function with the operator's parameters.

        Raises:
            NoImplementationError: no implementation fits.
        """
        impl = self._selected(op_name, args, kwargs)
        function = self._resolved.get(impl)
        if function is None:
            function = self._resolved[impl] = direct_function(self.state, impl)
        return function

    def get_selected_impl_id(self, op_name: str, *args: Any, **kwargs: Any) -> str:
        """Return the id of the implementation that :meth:`resolve` returns.

        Raises:
            NoImplementationError: no implementation fits.
        """
        return self._selected(op_name, args, kwargs).impl_id

    # ---- explaining

    def explain(self, op_name: str, *args: Any, scope: str | None = None, **kwargs: Any) -> Decision:
        """Explain for every registered implementation whether it runs, and why.

        Args:
            op_name: the operator.
            args, kwargs: a call's arguments; with them the decision is for that call.
            scope: a bound operator's scope.

        Raises:
            NoImplementationError: no backend registered the operator.
        """
        self.ensure_initialized()
        decision = self.state.decide(op_name, scope, self.table_keeper.policy_of(self._current()))
        if not args and not kwargs:
            return decision.noting(lambda impl: self.state.failures.for_some_kinds(impl, scope))
        call = Call.of(op_name, scope, args, kwargs)
        return decision.for_call(call.branch(decision), lambda impl: recovery.why_not_for_call(self.state, impl, call))

    def first_choices(
        self, op_name: str, *, in_layers: bool = False, given: Iterable[str] = (), tokens: int | None = None
    ) -> list[OpImpl]:
        """Return the implementations that the policy in force puts first, one for each condition of its rules.

        Facts and bans do not count, because a host asks before it states its facts.

        Args:
            op_name: the operator.
            in_layers: whether to add the first implementations of layers that rules name.
            given: optional parameters that the calls pass; an implementation without one of them does not count.
            tokens: the number of tokens of the calls; by default any.
        """
        self.ensure_initialized()
        if not self.registry.get_implementations(op_name):
            return []
        policy = self.table_keeper.policy_of(self._current())
        scopes: list[str | None] = [None, *(policy.scopes_of(op_name) if in_layers else ())]
        decisions = [self.state.decide(op_name, scope, policy, bans=False, facts=False) for scope in scopes]
        branches = [branch.candidates for decision in decisions for branch in decision.branches_for(tokens)]
        taking = ([impl for impl in impls if self._takes(impl, given)] for impls in branches)
        return list(dict.fromkeys(impls[0] for impls in taking if impls))

    def all_take(self, op_name: str, given: Iterable[str]) -> bool:
        """Whether every implementation, chosen or not, takes these optional parameters.

        A host that passes them anyway would skip implementations written before the parameters were declared.
        """
        self.ensure_initialized()
        return all(self._takes(impl, given) for impl in self.registry.get_implementations(op_name))

    def _takes(self, impl: OpImpl, given: Iterable[str]) -> bool:
        convention = self.registry.convention(impl)
        return convention is None or not {*given} & {*convention.left_out}

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, set[str]]:
        """Return the implementations that are banned for some or all calls: operator → ids."""
        failed: dict[str, set[str]] = {}
        for op, impl_id in self.state.failures.failures():
            if op_name in (None, op):
                failed.setdefault(op, set()).add(impl_id)
        return failed

    def call_counts(self) -> dict[tuple[str, str], int]:
        """Return calls by (operator, implementation id) while counting was on."""
        return self.state.counter.counts()

    # ---- state

    @property
    def registry(self) -> OpRegistry:
        """Return the registry of implementations."""
        return self.state.registry

    @property
    def frozen(self) -> bool:
        """Whether dispatch is frozen."""
        return self.state.frozen

    @property
    def lockstep(self) -> bool:
        """Whether this process runs in step with others; a fallback then aborts the step instead of diverging."""
        return self.state.lockstep

    @lockstep.setter
    def lockstep(self, value: bool) -> None:
        self.state.lockstep = value

    def ensure_initialized(self) -> None:
        """Register the built-in backends, discover plugins and build the tables, once.

        Raises:
            ConfigError: the settings are wrong, or a per-operator order leaves nothing to run.
            PluginLoadError: a plugin module that the user named does not load.
            RegistrationError: two implementations have one id, or a signature does not fit.
        """
        if self.table_keeper.root.stale:
            self._start.run()

    def ask_again(self) -> None:
        """Check the availability of all implementations again, lift all bans, and rebuild the tables.

        Raises:
            DispatchFrozenError: the answers would change a frozen choice.
        """
        with writers:
            with self.state.availability.asked_again():
                self._require_unchanged("asking everything again", bans=False)
            self.state.failures.clear()
            self._republish_unless_stale(None)

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Lift the bans of one operator, or all.

        Raises:
            DispatchFrozenError: a banned implementation would run again where another one is frozen.
        """
        with writers:
            self._require_unchanged("lifting bans", bans=False, only=op_name)
            self.state.failures.clear(op_name)
            self._republish_unless_stale(None if op_name is None else {op_name})

    def set_facts(self, **facts: Any) -> None:
        """State facts about the process that implementations may require, such as ``kv_layout="NHD"``.

        A ``frozenset`` states each of its members, for example all divisors of a block's size.

        Raises:
            DispatchFrozenError: the facts would change a frozen choice.
        """
        with writers:
            before, self.state.facts = self.state.facts, {**self.state.facts, **facts}
            try:
                self._require_unchanged("stating facts")
                self._republish_unless_stale(None)
            except BaseException:  # refused, or interrupted in an availability check: the change has no effect
                self.state.facts = before
                self.table_keeper.mark_stale()
                raise

    def keep_whole(self, op_names: Iterable[str]) -> frozenset[str]:
        """Make compiled code call these operators by their views, and trace all other operators that it can.

        A host that fuses calls in its graphs needs the views to find them.

        Returns:
            All operators called by their views now; unchanged while dispatch is frozen, because graphs depend on them.
        """
        with writers:
            if not self.frozen and (whole := frozenset(op_names)) != self.state.whole:
                self.state.whole = whole
                self._republish_unless_stale(None)
            return self.state.whole

    def unmatched_scopes(self) -> dict[str, list[str]]:
        """Return the policy's layer patterns that fit no bound layer, each with the operator's layers."""
        return checks.unmatched_scopes(self.state, GLOBAL.get())

    def warn_of_unmatched_scopes(self, *elsewhere: Mapping[str, list[str]]) -> None:
        """Log the policy's layer patterns that fit no layer; a host calls this once all layers are bound.

        Args:
            elsewhere: the :meth:`unmatched_scopes` of processes with other layers of the same model.
        """
        checks.warn_of_unmatched_scopes(self.unmatched_scopes(), *elsewhere)

    def set_counting(self, on: bool = True) -> None:
        """Start or stop counting calls by implementation; stopping keeps the counts.

        Counting wraps each implementation. It does not see replays of compiled or captured graphs, or calls of
        operators that were bound while dispatch was frozen, because these are the bare implementation.
        """
        with writers:
            self.state.counter.on = on
            self._republish_unless_stale(None)

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        self.state.counter.reset()

    # ---- decisions

    def _selected(self, op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpImpl:
        self.ensure_initialized()
        table = self._current()
        plan = table.plans.get(op_name)
        decision = plan.decision if plan else self.state.decide(op_name, None, self.table_keeper.policy_of(table))
        if not args and not kwargs:
            if decision.chosen is None:
                raise NoImplementationError(op_name, decision.reasons())
            return decision.chosen
        call = Call.of(op_name, None, args, kwargs)
        reasons = []
        for impl in call.branch(decision).candidates:
            reason = recovery.why_not_for_call(self.state, impl, call)
            if not reason:
                return impl
            reasons.append(f"{impl.impl_id}: {reason}")
        raise NoImplementationError(op_name, [*reasons, *decision.skipped_reasons()])

    def _current(self) -> DispatchTable:
        """Return the table that a call here reads."""
        root: DispatchTable = self.table_keeper.root
        current: DispatchTable = root if root.plain else root.current
        return current

    def republish(self, op_names: Iterable[str] | None) -> None:
        """Rebuild the entries of some operators, or of all, in every table; if frozen, fix new entries' choices."""
        self.table_keeper.rebuild(op_names)
        self._fix_new()

    def _fix_new(self) -> None:
        if self.frozen:
            for plan in self.table_keeper.root.plans.values():
                self._fixed(plan)

    def _fixed(self, plan: Plan) -> Choices:
        """Return the fixed choices of an operator or layer; fix them now if it came after the freeze."""
        return self.state.fixed.add((plan.op_name, plan.scope), partial(self.state.choices, plan.decision))

    # ---- changes from elsewhere

    def _require_unchanged(self, change: str, *, bans: bool = True, only: str | None = None) -> None:
        """Refuse a change, already made by the caller, if it alters a fixed choice."""
        if self.frozen:
            contexts = [table.policy for table in self.table_keeper.context_tables()]
            self.state.fixed.require_unchanged(change, [self.table_keeper.root.policy, *contexts], bans=bans, only=only)

    def admit_registration(self) -> None:
        """Refuse a registration, already made by the registry, if it alters a fixed choice."""
        self._require_unchanged("a registration")

    def on_registration(self, op_names: frozenset[str]) -> None:
        """Rebuild the entries of operators with changed registrations."""
        self._republish_unless_stale(op_names)

    def on_policy_change(self) -> Callable[[], None]:
        """Lift the bans and rebuild after a change of the global policy; return a function that undoes this."""
        with writers:
            before = self.state.failures.clear()

            def take_back() -> None:
                self.state.failures.restore(before)
                self.table_keeper.mark_stale()

            try:
                if before:
                    self._republish_unless_stale(None)
                elif not self.table_keeper.root.stale:
                    self.table_keeper.rebuild_root()
                    self._fix_new()
            except BaseException:
                take_back()
                raise
            return take_back

    def after_fork_in_child(self) -> None:
        """Reset what other threads of the parent were doing, because they do not exist in this child."""
        self._start.after_fork_in_child()
        self.state.availability.forget_who_asks()
        self.table_keeper.mark_stale()

    def _republish_unless_stale(self, op_names: Iterable[str] | None) -> None:
        if not self.table_keeper.root.stale:
            self.republish(op_names)
