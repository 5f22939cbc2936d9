"""The manager: it starts the backends, decides, and keeps the tables up to date.

A call reads one table entry and runs it (:mod:`fl_dispatch.calls`); what else a call may need happens in the entry, or
after an exception in :mod:`fl_dispatch.recovery`. Writers (a registration, a policy change, a ban, a first success)
change their own state and then rebuild the entries concerned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .calls import call_through, recover, unknown
from .compiled.freezing import Freezer
from .errors import DispatchFrozenError, NoImplementationError
from .knowledge.availability import Availability
from .knowledge.counting import CallCounter
from .knowledge.failures import FailureLog, Proofs
from .locking import writers
from .logger_manager import get_logger
from .ops import OPERATORS
from .policy import PolicyManager, SelectionPolicy
from .registry import OpRegistry
from .run import generated as entries
from .run import recovery
from .run.arguments import Call
from .run.keeper import TableKeeper
from .run.plan import direct_function, frozen_function
from .run.table import DispatchTable
from .selection import checks as rules
from .selection.decision import Decision, select
from .settings import get_settings
from .types import OpImpl

logger = get_logger(__name__)
managers: weakref.WeakSet[OpManager] = weakref.WeakSet()
"""All managers that live."""


class OpManager:
    """Selects and calls operator implementations.

    Args:
        registry: the implementations; a new empty registry by default.
        register_builtins: register the built-in backends and discover plugins at the first use.
        root: the table for the global policy; a private one by default.

    Attributes:
        failures: the bans.
        proofs: which implementations have succeeded.
        availability: which implementations can run here, each asked once.
        counter: calls by implementation, while counting is on.
        freezer: what is fixed while dispatch is frozen.
        tables: what calls read, kept up to date.
        lockstep: set by a host whose ranks run in step; a fallback then aborts the step instead of diverging.
    """

    def __init__(
        self,
        registry: OpRegistry | None = None,
        *,
        register_builtins: bool = True,
        root: DispatchTable | None = None,
    ) -> None:
        self.failures = FailureLog()
        self.proofs = Proofs()
        self.counter = CallCounter()
        self.lockstep = False
        self._registry = OpRegistry() if registry is None else registry
        self._register_builtins = register_builtins
        self._started = False
        self._starting = False
        self.availability = Availability()
        self._resolved: dict[OpImpl, Callable[..., Any]] = {}
        self._facts: Mapping[str, Any] = {}
        self._epoch = 0
        self.tables = TableKeeper(self, root)
        self.freezer = Freezer(self)
        self._registry.subscribe(self._on_registration, self._admit_registration)
        with writers:
            managers.add(self)

    # ---- calling

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operator; see :func:`fl_dispatch.call_op`."""
        return call_through(self.tables.root, op_name, args, kwargs)

    def bind(self, op_name: str, scope: str | None = None) -> Callable[..., Any]:
        """A function that runs an operator; see :func:`fl_dispatch.bind_op`."""
        self.ensure_initialized()
        key = self.tables.bind(op_name, scope or "")
        operator = OPERATORS.get(op_name)
        root = self.tables.root
        if operator is None:
            return lambda *args, **kwargs: call_through(root, op_name, args, kwargs, key)
        if self.frozen and key in root.decisions and not self.counter.on:
            fixed = self.freezer.fix(root.decisions[key])
            if fixed[0].sole:
                return frozen_function(self, root.policy, root.decisions[key])
        return entries.bound(operator, key, root, recover, unknown)

    def resolve(self, op_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The implementation that a call would run, without fallback.

        Without arguments it is the first candidate; with them, the one that those arguments would run. An
        implementation that takes a layer, or leaves parameters out, comes as a function with the operator's own
        parameters.

        Raises:
            NoImplementationError: there is none.
        """
        impl = self._selected(op_name, args, kwargs)
        function = self._resolved.get(impl)
        if function is None:
            function = self._resolved[impl] = direct_function(self, impl)
        return function

    def get_selected_impl_id(self, op_name: str, *args: Any, **kwargs: Any) -> str:
        """The id of the implementation that :meth:`resolve` returns.

        Raises:
            NoImplementationError: there is none.
        """
        return self._selected(op_name, args, kwargs).impl_id

    # ---- explaining

    def explain(self, op_name: str, *args: Any, scope: str | None = None, **kwargs: Any) -> Decision:
        """Which implementation runs, and why, for every registered one.

        Args:
            op_name: the operator.
            args, kwargs: a call's arguments; with them the decision is for that call.
            scope: a bound operator's scope.

        Raises:
            NoImplementationError: nobody registered the operator.
        """
        self.ensure_initialized()
        decision = self.decide(op_name, scope, self.tables.policy_of(self.tables.current()))
        if not args and not kwargs:
            return decision
        call = Call.of(op_name, scope, args, kwargs)
        return decision.for_call(call.branch(decision), lambda impl: recovery.refusal(self, impl, call))

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, set[str]]:
        """The implementations that are banned for some or all calls: operator → ids."""
        failed: dict[str, set[str]] = {}
        for op, impl_id in self.failures.failures():
            if op_name in (None, op):
                failed.setdefault(op, set()).add(impl_id)
        return failed

    def call_counts(self) -> dict[tuple[str, str], int]:
        """Calls by (operator, implementation id) while counting was on."""
        return self.counter.counts()

    # ---- state

    @property
    def registry(self) -> OpRegistry:
        """The implementations."""
        return self._registry

    @property
    def frozen(self) -> bool:
        """Whether dispatch is frozen."""
        return self.freezer.manifest is not None

    @property
    def policy_epoch(self) -> int:
        """How often everything was asked again."""
        return self._epoch

    def ensure_initialized(self) -> None:
        """Register the built-in backends, discover plugins and build the tables, once.

        Raises:
            ConfigError: the settings are wrong, or a per-operator order leaves nothing to run.
            PluginLoadError: a plugin module that the user named does not load.
            RegistrationError: two implementations have one id, or a signature does not fit.
        """
        if not self.tables.root.settled:
            self._bring_up()

    def bump_policy_epoch(self) -> None:
        """Ask everything again: availability, bans, tables.

        Raises:
            DispatchFrozenError: the answers would change what is frozen.
        """
        with writers:
            with self.availability.asked_again():
                self.freezer.check("asking everything again", bans=False)
            self._epoch += 1
            self.failures.clear()
            self._republish_if_settled(None)

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Lift the bans of one operator, or all.

        Raises:
            DispatchFrozenError: a banned implementation would run again where another one is frozen.
        """
        with writers:
            self.freezer.check("lifting bans", bans=False, only=op_name)
            self.failures.clear(op_name)
            self._republish_if_settled(None if op_name is None else {op_name})

    def set_facts(self, **facts: Any) -> None:
        """State facts about the process that implementations may require, such as ``kv_layout="NHD"``.

        Raises:
            DispatchFrozenError: the facts would change what is frozen.
        """
        with writers:
            before, self._facts = self._facts, {**self._facts, **facts}
            try:
                self.freezer.check("stating facts")
            except DispatchFrozenError:
                self._facts = before
                raise
            self._republish_if_settled(None)

    def unmatched_scopes(self) -> dict[str, list[str]]:
        """The layer patterns of the policy that fit no layer that was bound, each with the operator's layers."""
        return rules.unmatched_scopes(self, PolicyManager.get_instance().get_global_policy())

    def warn_of_unmatched_scopes(self, *elsewhere: Mapping[str, list[str]]) -> None:
        """Log each layer pattern of the policy that fits no layer; a host calls it once all are bound.

        Args:
            elsewhere: the :meth:`unmatched_scopes` of processes that have other layers of the same model.
        """
        rules.warn_of_unmatched_scopes(self.unmatched_scopes(), *elsewhere)

    def set_counting(self, on: bool = True) -> None:
        """Count calls by implementation from now on, or stop; what was counted stays.

        Counting puts a wrapper before each implementation. What a compiled or captured graph replays is not seen, nor
        are calls of operators that were bound while dispatch was frozen: they are the implementation itself.
        """
        with writers:
            self.counter.on = on
            self._republish_if_settled(None)

    def reset_counts(self) -> None:
        """Start counting from zero."""
        self.counter.reset()

    # ---- what recovery tells and asks

    def prove(self, impl: OpImpl, *, wrote: bool) -> None:
        """An implementation succeeded; ``wrote`` when it was free to overwrite arguments."""
        if self.proofs.holds(impl, wrote=wrote):
            return
        with writers:
            first = self.proofs.add(impl, wrote=wrote)
            self.republish({impl.op_name})
        if first:
            logger.info("Op '%s' using %s", impl.op_name, impl)

    def watch(self, impl: OpImpl) -> None:
        """Keep copies of what an implementation overwrites from now on."""
        with writers:
            self.proofs.watch(impl)
        self.republish({impl.op_name})

    # ---- decisions

    def decide(self, op_name: str, scope: str | None, policy: SelectionPolicy, *, bans: bool = True) -> Decision:
        """Rank an operator's implementations under a policy, with or without the bans.

        Raises:
            NoImplementationError: nobody registered the operator.
        """
        impls = self._registry.get_implementations(op_name)
        if not impls:
            raise unknown(op_name)
        return select(
            op_name,
            impls,
            policy,
            scope=scope,
            available=self.availability.of,
            banned=self.failures.as_a_whole if bans else lambda impl: "",
            facts=self._facts,
        )

    def _selected(self, op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpImpl:
        self.ensure_initialized()
        table = self.tables.current()
        decision = table.decisions.get(op_name) or self.decide(op_name, None, self.tables.policy_of(table))
        if not args and not kwargs:
            if decision.chosen is None:
                raise NoImplementationError(op_name, decision.reasons())
            return decision.chosen
        call = Call.of(op_name, None, args, kwargs)
        reasons = []
        for impl in call.branch(decision).candidates:
            reason = recovery.refusal(self, impl, call)
            if not reason:
                return impl
            reasons.append(f"{impl.impl_id}: {reason}")
        raise NoImplementationError(op_name, [*reasons, *decision.skipped_reasons()])

    # ---- start

    def _bring_up(self) -> None:
        with writers:
            if self.tables.root.settled:
                return  # another thread did
            if self._register_builtins and not self._started and not self._starting:
                self._starting = True  # a plugin that dispatches while it registers gets what is there so far
                try:
                    self._start()
                finally:
                    self._starting = False
                self._started = True
            self.republish(None)

    def _start(self) -> None:
        from .builtin_ops import register_builtins
        from .discovery import discover_plugins

        settings = get_settings()
        register_builtins(self._registry)
        discover_plugins(self._registry)
        policy = PolicyManager.get_instance().get_global_policy()
        rules.check(self, policy)
        if settings.dispatch_debug:
            self.counter.on = True
            for op_name in self._registry.list_operators():
                logger.info("%s", self.decide(op_name, None, policy))

    def republish(self, op_names: Iterable[str] | None) -> None:
        """Rebuild the entries of some operators, or of all, in every table; if frozen, fix what is new."""
        self.tables.republish(op_names)
        if self.frozen:
            for decision in self.tables.root.decisions.values():
                self.freezer.fix(decision)

    # ---- changes from elsewhere

    def _admit_registration(self) -> None:
        self.freezer.check("a registration")

    def _on_registration(self, op_names: frozenset[str]) -> None:
        self._republish_if_settled(op_names)

    def on_policy_change(self) -> None:
        """The global policy is another one: lift the bans and rebuild."""
        with writers:
            self.failures.clear()
            self._republish_if_settled(None)

    def after_fork_in_child(self) -> None:
        """Start anew what another thread of the parent was doing: it does not exist here."""
        if not writers.mine:
            self._starting = False
            self.availability.forget_who_asks()
        self.tables.unsettle()

    def _republish_if_settled(self, op_names: Iterable[str] | None) -> None:
        if self.tables.root.settled:
            self.republish(op_names)
