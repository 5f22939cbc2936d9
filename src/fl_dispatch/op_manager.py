"""The manager: it starts the backends, decides, and keeps the tables up to date.

A call reads one table entry and runs it (:mod:`fl_dispatch.calls`); what else a call may need happens in the entry, or
after an exception in :mod:`fl_dispatch.recovery`. Writers (a registration, a policy change, a ban, a first success)
change their own state and then rebuild the entries concerned.
"""

from __future__ import annotations

import fnmatch
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from . import entries, recovery
from .builder import direct_function, frozen_function
from .calls import bind_op, call_op, call_through, explain, is_layer_first, parse_key, resolve_op, unknown
from .calls import recover as recover_call
from .counting import CallCounter
from .errors import ConfigError, DispatchFrozenError, NoImplementationError
from .failures import FailureLog, Proofs
from .freezing import Freezer, Manifest, frozen_ones
from .locking import writers
from .logger_manager import get_logger
from .ops import OPERATORS
from .policy import PolicyManager, SelectionPolicy
from .recovery import Call
from .registry import OpRegistry
from .selection import Decision, select
from .settings import get_settings
from .table import ROOT, DispatchTable
from .tables import TableKeeper
from .types import OpImpl

logger = get_logger(__name__)
_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()


class OpManager:
    """Selects and calls operator implementations.

    Args:
        registry: the implementations; a new empty registry by default.
        register_builtins: register the built-in backends and discover plugins at the first use.
        root: the table for the global policy; a private one by default.

    Attributes:
        failures: the bans.
        proofs: which implementations have succeeded.
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
        self._available: dict[OpImpl, tuple[bool, str]] = {}
        self._asking: set[OpImpl] = set()
        self._resolved: dict[OpImpl, Callable[..., Any]] = {}
        self._facts: Mapping[str, Any] = {}
        self._epoch = 0
        self.tables = TableKeeper(self, root)
        self.freezer = Freezer(self)
        self._registry.subscribe(self._on_registration, self._admit_registration)
        with writers:
            _managers.add(self)

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
        fixed = self.freezer.choices(op_name, scope or None)
        if fixed is not None and len(fixed) == 1 and len(fixed[0].runs) == 1 and not self.counter.on:
            return frozen_function(self, root.policy, root.decisions[key])
        return entries.bound(operator, key, root, recover_call, unknown)

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
        decision = self.decide(op_name, scope, self.tables.current().policy)
        if not args and not kwargs:
            return decision
        call = self._call_of(op_name, scope, args, kwargs)
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
            before, self._available = self._available, {}
            try:
                self.freezer.check("asking everything again", bans=False)
            except DispatchFrozenError:
                self._available = before
                raise
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

    def warn_of_unmatched_scopes(self) -> None:
        """Log each layer pattern of the policy that fits no layer that was bound; a host calls it once all are."""
        policy = PolicyManager.get_instance().get_global_policy()
        for key, _ in (*policy.per_op_order, *policy.op_tuned):
            op_name, at, pattern = key.partition("@")
            scopes = self.tables.scopes(op_name)
            if at and not any(fnmatch.fnmatchcase(scope, pattern) for scope in scopes):
                examples = ", ".join(sorted(filter(None, scopes))[:2]) or "none"
                logger.warning("'%s' fits no layer; layers of '%s' are, for example: %s", key, op_name, examples)

    def set_counting(self, on: bool = True) -> None:
        """Count calls by implementation from now on, or stop; what was counted stays.

        Counting puts a wrapper before each implementation; what a compiled or captured graph replays is not seen.
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

    def invoke(self, impl: OpImpl, call: Call) -> Any:
        """Run one implementation with a call's arguments in the form that it takes."""
        fn = self.counter.function(impl)
        convention = self._registry.convention(impl)
        if call.operator is None or convention is None:
            return fn(*call.args, **call.kwargs)
        values = dict(zip(call.operator.parameters, call.args, strict=True))
        taken = [values[name] for name in convention.takes]
        if not convention.layer_first:
            return fn(*taken)
        layer = call.layer
        if layer is None:
            layer = entries.stand_in(call.operator, values)
        return fn(layer, *taken)

    def recover(
        self,
        key: str,
        table: DispatchTable,
        fn: Callable[..., Any],
        error: Exception,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Go on after a table entry raised; see :func:`fl_dispatch.recovery.recover`."""
        op_name, scope, layer_first = parse_key(key)
        operator = OPERATORS.get(op_name)
        layer = None
        try:
            if layer_first and operator is not None:
                layer, kwargs = args[0], entries.from_layer(operator, args[0], args[1:], kwargs)
                args = ()
            call = Call(op_name, operator, scope, args, kwargs, layer)
        except TypeError:
            raise error from None  # the call does not fit the operator: the caller's mistake
        decision = getattr(fn, "fl_decision", None) or table.decisions.get(key)
        decision = decision or self.decide(op_name, scope, table.policy)
        failed = self._who(fn, op_name) or call.branch(decision).candidates[0]
        try:
            return recovery.recover(self, table.policy, decision, call, failed, error)
        finally:
            del error, call, args, kwargs

    def _who(self, fn: Callable[..., Any], op_name: str) -> OpImpl | None:
        """The implementation that a table's function runs: a generated one says so, a bare one is its own."""
        named: OpImpl | None = getattr(fn, "fl_impl", None)
        if named is not None:
            return named
        impls = self._registry.get_implementations(op_name)
        return next((impl for impl in impls if self.counter.is_function_of(fn, impl)), None)

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
            available=self._availability,
            banned=self.failures.as_a_whole if bans else lambda impl: "",
            facts=self._facts,
        )

    def _availability(self, impl: OpImpl) -> tuple[bool, str]:
        answer = self._available.get(impl)
        if answer is not None:
            return answer
        with writers:
            if impl in self._asking:  # the check itself dispatches
                return False, "its availability is being asked"
            if impl not in self._available:
                self._asking.add(impl)
                try:
                    self._available[impl] = impl.availability()
                finally:
                    self._asking.discard(impl)
            return self._available[impl]

    def _selected(self, op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpImpl:
        self.ensure_initialized()
        table = self.tables.current()
        decision = table.decisions.get(op_name) or self.decide(op_name, None, table.policy)
        if not args and not kwargs:
            if decision.chosen is None:
                raise NoImplementationError(op_name, decision.reasons())
            return decision.chosen
        call = self._call_of(op_name, None, args, kwargs)
        reasons = []
        for impl in call.branch(decision).candidates:
            reason = recovery.refusal(self, impl, call)
            if not reason:
                return impl
            reasons.append(f"{impl.impl_id}: {reason}")
        raise NoImplementationError(op_name, [*reasons, *decision.skipped_reasons()])

    def _call_of(self, op_name: str, scope: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        operator = OPERATORS.get(op_name)
        if operator is not None and is_layer_first(operator, args):
            return Call(op_name, operator, scope, (), entries.from_layer(operator, args[0], args[1:], kwargs), args[0])
        return Call(op_name, operator, scope, args, kwargs)

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
        self._check_orders(policy)
        if settings.dispatch_debug:
            self.counter.on = True
            for op_name in self._registry.list_operators():
                logger.info("%s", self.decide(op_name, None, policy))

    def _check_orders(self, policy: SelectionPolicy) -> None:
        for key, order in policy.per_op_order:
            op_name = key.partition("@")[0]
            origin = policy.origin(f"per_op_order.{key}")
            if not self._registry.get_implementations(op_name):
                logger.warning("The order of '%s' (%s) has no effect: nobody registered it", op_name, origin)
                continue
            decision = self.decide(op_name, None, replace(policy, per_op_order=((op_name, order),)))
            if not decision.candidates:
                why = "; ".join(decision.reasons())
                raise ConfigError(str(origin), key, f"the order {', '.join(order)} leaves nothing to run: {why}")
        for key, rules in policy.op_tuned:
            operator = OPERATORS.get(key.partition("@")[0])
            if operator is not None and not operator.phases and any(rule.phase for rule in rules):
                problem = f"'{operator.name}' cannot tell prefill from decode, so a rule with 'phase' never holds"
                raise ConfigError(str(policy.origin("op_tuned")), key, problem)

    def republish(self, op_names: Iterable[str] | None) -> None:
        """Rebuild the entries of some operators, or of all, in every table."""
        self.tables.republish(op_names)

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
            self._asking.clear()
        self.tables.unsettle()

    def _republish_if_settled(self, op_names: Iterable[str] | None) -> None:
        if self.tables.root.settled:
            self.republish(op_names)


# ---- the default manager

_default: OpManager | None = None


def get_default_manager() -> OpManager:
    """The process's manager, which :func:`fl_dispatch.call_op` uses."""
    global _default
    manager = _default
    if manager is None:
        with writers:
            manager = _default
            if manager is None:
                manager = OpManager(root=ROOT)
                policies = PolicyManager.get_instance()
                policies.on_table = manager.tables.adopt
                for table in policies.tables():
                    manager.tables.adopt(table)
                _default = manager
    return manager


def reset_default_manager() -> None:
    """Forget registrations, bans, counts and settings; the next use starts anew. Bound operators, contexts follow.

    Raises:
        DispatchFrozenError: dispatch is frozen.
    """
    global _default
    with writers:
        old = _default
        if old is not None and old.frozen:
            raise DispatchFrozenError("a new manager", ["everything is asked anew"])
        _default = None
        PolicyManager.get_instance().reread_settings()
        new = get_default_manager()
        if old is not None:
            old.tables.retire(new.tables)
        new.tables.unsettle()
        _policy_changed()


def freeze_dispatch() -> Manifest:
    """Fix what every operator and bound layer runs from here on; for hosts that compile or capture.

    From then on an operator that is bound anew is the implementation itself; a failure of an implementation is raised,
    because nothing may take over; and a change of the policy (also a context), of registrations, bans or facts that
    would make something else run raises :class:`DispatchFrozenError` and changes nothing. Idempotent.

    Returns:
        The manifest: what runs, why, and a hash that is equal in processes that run the same.

    >>> manifest = freeze_dispatch()
    >>> sorted(manifest.choices)[0], len(manifest.hash)
    ('attention_backend', 16)
    >>> thaw_dispatch()
    """
    return get_default_manager().freezer.freeze()


def thaw_dispatch() -> None:
    """Allow changes again. Operators that were bound while dispatch was frozen stay what they are."""
    get_default_manager().freezer.thaw()


def _start_root() -> None:
    get_default_manager().ensure_initialized()


def _policy_changed() -> None:
    with writers:
        for manager in list(_managers):
            manager.on_policy_change()


def _admit_policy(change: str, policy: Callable[[], SelectionPolicy], bans: bool) -> None:
    for freezer in frozen_ones():
        freezer.admit(change, policy(), bans=bans)


def _after_fork_in_child() -> None:
    for manager in list(_managers):
        manager.after_fork_in_child()


_start_root._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo runs it at trace time
ROOT.start = _start_root
PolicyManager.get_instance().on_change = _policy_changed
PolicyManager.get_instance().admit = _admit_policy
os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = [
    "OpManager",
    "bind_op",
    "call_op",
    "explain",
    "freeze_dispatch",
    "get_default_manager",
    "reset_default_manager",
    "resolve_op",
    "thaw_dispatch",
]
