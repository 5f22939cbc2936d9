"""The manager: it starts the backends, keeps the tables up to date, and calls.

A call reads one table entry and runs it (see :mod:`fl_dispatch.table`); whatever else a call may need happens in the entry, or after an
exception in :mod:`fl_dispatch.recovery`. Writers (a registration, a policy change, a ban, a first success) change their own state and then
rebuild the entries concerned.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import entries as build
from . import recovery
from .errors import ConfigError, NoImplementationError
from .logger_manager import apply_log_level, get_logger
from .ops import OPERATORS, Operator
from .policy import PolicyManager, SelectionPolicy
from .recovery import Call, FailureLog, Settled
from .registry import OpRegistry
from .selection import Decision, admits, select
from .settings import get_settings, reset_settings
from .table import ROOT, DispatchTable, PrivateTable
from .types import OpImpl

logger = get_logger(__name__)
_Tensor = torch.Tensor
_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()
_starting = threading.RLock()  # held while a manager starts; at a fork it is waited for, and new in the child
_held_at_fork = False


class OpManager:
    """Selects and calls operator implementations.

    Args:
        registry: the implementations; a new empty registry by default.
        register_builtins: register the built-in backends and discover plugins at the first use.
        table: the root table; the default manager's is :data:`fl_dispatch.table.ROOT`.
    """

    def __init__(
        self, registry: OpRegistry | None = None, *, register_builtins: bool = True, table: DispatchTable | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._registry = OpRegistry() if registry is None else registry
        self._register_builtins = register_builtins
        self._started = False
        self._available: dict[OpImpl, tuple[bool, str]] = {}
        self._proven: frozenset[tuple[str, str, bool]] = frozenset()
        self._copying: frozenset[tuple[str, str]] = frozenset()
        self._scopes: dict[str, frozenset[str]] = {}
        self._facts: Mapping[str, Any] = {}
        self._counting = False
        self._counters: dict[tuple[str, str], dict[int, int]] = {}
        self._wrapped: dict[OpImpl, Callable[..., Any]] = {}
        self._epoch = 0
        self.failures = FailureLog()
        self.lockstep = False
        """Set by a host whose ranks run in step: a fallback then aborts the step instead of diverging from the other ranks."""
        self._root = PrivateTable() if table is None else table
        self._root.owner = self
        self._root.unsettle()
        self._tables: weakref.WeakSet[DispatchTable] = weakref.WeakSet()
        self._private: dict[SelectionPolicy, DispatchTable] = {}
        self._registry.subscribe(self._on_registration)
        _managers.add(self)

    # ---------------------------------------------------------------- calling

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operator; see :func:`call_op`."""
        return _call(self._root, op_name, args, kwargs)

    def resolve(self, op_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The implementation that a call would run, without fallback.

        Without arguments it is the first candidate; with them, the one that those arguments would run. An implementation that
        takes a layer, or leaves parameters out, comes as a function with the operator's own parameters.

        Raises:
            NoImplementationError: there is none.
        """
        impl = self._selected(op_name, args, kwargs)
        convention = self._registry.convention(impl)
        return build.direct(OPERATORS.get(op_name), impl, convention, build.CALL, impl.fn, None)

    def get_selected_impl_id(self, op_name: str, *args: Any, **kwargs: Any) -> str:
        """The id of the implementation that :meth:`resolve` returns.

        Raises:
            NoImplementationError: there is none.
        """
        return self._selected(op_name, args, kwargs).impl_id

    def bind(self, op_name: str, scope: str | None = None) -> Callable[..., Any]:
        """A function that runs an operator; see :func:`bind_op`."""
        self.ensure_initialized()
        operator = OPERATORS.get(op_name)
        key = f"{op_name}@{scope or ''}"
        with self._lock:
            self._scopes[op_name] = self._scopes.get(op_name, frozenset()) | {scope or ""}
            for table in self._all_tables():
                self._refresh(table, [(key, op_name, scope or None, build.BOUND)])
        if operator is None:
            root = self._root
            return lambda *args, **kwargs: _call(root, op_name, args, kwargs, key=key)
        return build.bound(operator, key, self._root, _starter(self._root), _recover)

    # ---------------------------------------------------------------- explaining

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
        decision = self._decide(op_name, scope, self._table().policy)
        if not args and not kwargs:
            return decision
        call = self._call_of(op_name, scope, args, kwargs)
        return decision.for_call(
            recovery.candidates(decision, call), lambda impl: recovery.refusal(self, impl, call)
        )

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, set[str]]:
        """The implementations that are banned for some or all calls: operator → ids."""
        failed: dict[str, set[str]] = {}
        for op, impl_id in self.failures.failures():
            if op_name in (None, op):
                failed.setdefault(op, set()).add(impl_id)
        return failed

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Lift the bans of one operator, or all."""
        self.failures.clear(op_name)
        self.republish(None if op_name is None else frozenset({op_name}))

    # ---------------------------------------------------------------- state

    @property
    def registry(self) -> OpRegistry:
        """The implementations."""
        return self._registry

    def ensure_initialized(self) -> None:
        """Register the built-in backends, discover plugins and build the tables, once.

        Raises:
            ConfigError: the settings are wrong, or a per-operator order leaves nothing to run.
            PluginLoadError: a plugin module that the user named does not load.
            RegistrationError: two implementations have one id, or a signature does not fit.
        """
        if self._root.settled:
            return
        with _starting, self._lock:
            if self._root.settled:
                return
            if self._register_builtins and not self._started:
                from .builtin_ops import register_builtins
                from .discovery import discover_plugins

                settings = get_settings()
                apply_log_level(settings)
                register_builtins(self._registry)
                discover_plugins(self._registry)
                self._check_orders(PolicyManager.get_instance().get_global_policy())
                self._counting = self._counting or settings.dispatch_debug
            self._started = True
            self.republish(None)
            if self._register_builtins and get_settings().dispatch_debug:
                for decision in self._root.decisions.values():
                    logger.info("%s", decision)

    def bump_policy_epoch(self) -> None:
        """Ask everything again: availability, bans, tables."""
        with self._lock:
            self._epoch += 1
            self._available = {}
            self.failures.clear()
            self.republish(None)

    @property
    def policy_epoch(self) -> int:
        """How often everything was asked again."""
        return self._epoch

    def set_facts(self, **facts: Any) -> None:
        """State facts about the process that implementations may require, such as ``kv_layout="NHD"``."""
        with self._lock:
            self._facts = {**self._facts, **facts}
            self.republish(None)

    def set_counting(self, on: bool = True) -> None:
        """Count calls by implementation from now on, or stop. Counting costs a wrapper a call; without it there is none."""
        with self._lock:
            self._counting = on
            self._wrapped = {}
            self.republish(None)

    def call_counts(self) -> dict[tuple[str, str], int]:
        """Calls by (operator, implementation id) while counting was on."""
        return {key: sum(by_thread.values()) for key, by_thread in list(self._counters.items())}

    def reset_counts(self) -> None:
        """Start counting from zero."""
        for by_thread in list(self._counters.values()):
            by_thread.clear()

    # ---------------------------------------------------------------- what recovery asks and tells

    def invoke(self, impl: OpImpl, call: Call) -> Any:
        """Run one implementation with a call's arguments in the form that it takes."""
        fn = self._function(impl)
        convention = self._registry.convention(impl)
        operator = call.operator
        if operator is None or convention is None:
            return fn(*call.args, **call.kwargs)
        values = dict(zip(operator.parameters, call.args, strict=True))
        taken = [values[name] for name in convention.takes]
        if not convention.layer_first:
            return fn(*taken)
        layer = call.layer
        if layer is None:
            attributes = operator.layer.attributes if operator.layer else {}
            layer = build.LayerStandIn({attribute: values[name] for name, attribute in attributes.items()})
        return fn(layer, *taken)

    def needs_copies(self, impl: OpImpl) -> bool:
        """Whether a copy of the arguments that it overwrites is kept while it runs."""
        key = (impl.op_name, impl.impl_id)
        return (*key, True) not in self._proven or key in self._copying

    def prove(self, impl: OpImpl, *, wrote: bool) -> None:
        """An implementation succeeded; ``wrote`` when it was free to overwrite arguments."""
        key = (impl.op_name, impl.impl_id, wrote)
        if key in self._proven:
            return
        with self._lock:
            first = not {(impl.op_name, impl.impl_id, flag) for flag in (True, False)} & self._proven
            self._proven |= {key}
        if first:
            logger.info("Op '%s' using %s", impl.op_name, impl)
        self.republish(frozenset({impl.op_name}))

    def keep_copies(self, impl: OpImpl) -> None:
        """From now on keep a copy of what an implementation overwrites: it failed after it had been proven."""
        with self._lock:
            self._copying |= {(impl.op_name, impl.impl_id)}
        self.republish(frozenset({impl.op_name}))

    def recover(
        self, key: str, table: DispatchTable, fn: Callable[..., Any], error: Exception, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Go on after a table entry raised."""
        op_name, scope, is_layer = _parse(key)
        operator = OPERATORS.get(op_name)
        layer = None
        try:
            if is_layer and operator is not None:
                layer, args, kwargs = args[0], (), build.from_layer(operator, args[0], args[1:], kwargs)
            call = Call(op_name, operator, scope, args, kwargs, layer)
        except TypeError:
            raise error from None  # the call does not fit the operator: the caller's mistake
        decision = table.decisions.get(key) or self._decide(op_name, scope, table.policy)
        failed = self._owner_of(fn, recovery.candidates(decision, call))
        return recovery.recover(self, table.policy, decision, call, failed, error)

    # ---------------------------------------------------------------- tables

    def republish(self, op_names: Iterable[str] | None) -> None:
        """Rebuild the entries of some operators, or of all, in every table."""
        if not self._started and self._register_builtins:
            return
        self._started = True
        with self._lock:
            for table in self._all_tables():
                if op_names is None or not table.settled:
                    self._fill(table)
                else:
                    self._refresh(table, [key for op in op_names for key in self._keys(op)])

    def context_table(self) -> DispatchTable:
        """The table for the policy in force here (for a manager that is not the default one)."""
        policies = PolicyManager.get_instance()
        policy = policies.get_policy()
        if policy is policies.get_global_policy():
            return self._root
        with self._lock:
            table = self._private.get(policy)
            if table is None:
                if len(self._private) >= PolicyManager.KEPT_TABLES:
                    self._private.clear()
                table = self._private[policy] = DispatchTable(policy)
                self.adopt(table)
        return table

    def adopt(self, table: DispatchTable) -> None:
        """Fill a context's table and keep it up to date as long as it lives."""
        with self._lock:
            table.owner = self
            self._tables.add(table)
            if self._root.settled:
                self._fill(table)

    def _all_tables(self) -> list[DispatchTable]:
        return [self._root, *self._tables]

    def _table(self) -> DispatchTable:
        return self._root if self._root.plain else self._root.current

    def _fill(self, table: DispatchTable) -> None:
        if table is self._root:
            table.policy = PolicyManager.get_instance().get_global_policy()
        keys = [key for op_name in self._registry.list_operators() for key in self._keys(op_name)]
        entries, decisions = self._build(table.policy, keys)
        table.publish(entries, decisions)

    def _refresh(self, table: DispatchTable, keys: list[_Key]) -> None:
        if not table.settled:
            return
        entries, decisions = self._build(table.policy, keys)
        gone = {key for key, op_name, _, _ in keys if key not in entries}
        table.publish(
            {**{key: value for key, value in table.entries.items() if key not in gone}, **entries},
            {**{key: value for key, value in table.decisions.items() if key not in gone}, **decisions},
        )

    def _keys(self, op_name: str) -> list[_Key]:
        keys: list[_Key] = [(op_name, op_name, None, build.CALL)]
        operator = OPERATORS.get(op_name)
        if operator is not None and operator.layer is not None:
            keys.append((f"{op_name}:layer", op_name, None, build.LAYER))
        for scope in sorted(self._scopes.get(op_name, ())):
            keys.append((f"{op_name}@{scope}", op_name, scope or None, build.BOUND))
        return keys

    def _build(
        self, policy: SelectionPolicy, keys: list[_Key]
    ) -> tuple[dict[str, Callable[..., Any]], dict[str, Decision]]:
        entries: dict[str, Callable[..., Any]] = {}
        decisions: dict[str, Decision] = {}
        for key, op_name, scope, form in keys:
            try:
                decisions[key] = decision = self._decide(op_name, scope, policy)
            except NoImplementationError:
                continue
            entries[key] = self._entry(decision, policy, form, key)
        return entries, decisions

    def _entry(self, decision: Decision, policy: SelectionPolicy, form: str, key: str) -> Callable[..., Any]:
        """The function for one key: the bare implementation wherever nothing has to happen before it."""
        operator = OPERATORS.get(decision.op_name)
        slow = self._slow(decision, policy, form)
        if decision.conditional:
            return self._conditional(decision, policy, form, operator, slow)
        return self._unconditional(decision.candidates, operator, form, slow, decision.scope)

    def _unconditional(
        self, candidates: tuple[OpImpl, ...], operator: Operator | None, form: str, slow: Callable[..., Any], scope: str | None
    ) -> Callable[..., Any]:
        if not candidates:
            return slow
        first = candidates[0]
        key = (first.op_name, first.impl_id)
        if key in self._copying or self.failures.touches(first, scope):
            return slow
        unproven: list[str] = []
        if (*key, True) not in self._proven:
            if (*key, False) not in self._proven:
                return slow
            writes = operator.writes.values() if operator is not None else ()
            if any(write.given is None for write in writes):
                return slow
            unproven = list(dict.fromkeys(write.given for write in writes if write.given is not None))
        convention = self._registry.convention(first)
        return build.direct(operator, first, convention, form, self._function(first), slow, unproven)

    def _conditional(
        self, decision: Decision, policy: SelectionPolicy, form: str, operator: Operator | None, slow: Callable[..., Any]
    ) -> Callable[..., Any]:
        if operator is None or form == build.LAYER:
            return slow
        branches = [
            (branch.rule, self._unconditional(branch.candidates, operator, build.BOUND, slow, decision.scope))
            for branch in decision.branches
        ]
        declared = operator

        def conditional(*args: Any, **kwargs: Any) -> Any:
            full = declared.bind(args, kwargs) if kwargs or len(args) < len(declared.parameters) else args
            workload = declared.workload(*full)
            for rule, entry in branches:
                if rule is None or admits(rule, workload):
                    return entry(*full)
            raise AssertionError("the last branch has no condition")

        return conditional

    def _slow(self, decision: Decision, policy: SelectionPolicy, form: str) -> Callable[..., Any]:
        op_name, scope = decision.op_name, decision.scope
        operator = OPERATORS.get(op_name)

        def careful(*args: Any, **kwargs: Any) -> Any:
            layer = None
            if torch.compiler.is_dynamo_compiling():
                return self._traced(decision, args, kwargs)
            if form == build.LAYER and operator is not None:
                layer, args, kwargs = args[0], (), build.from_layer(operator, args[0], args[1:], kwargs)
            call = Call(op_name, operator, scope, args, kwargs, layer)
            try:
                return recovery.run(self, policy, decision, call)
            except Exception as error:
                settled = Settled(error)
            raise settled

        return careful

    def _traced(self, decision: Decision, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What Dynamo traces while the first candidate is unproven: that candidate, as a constant."""
        impl = decision.candidates[0]
        convention = self._registry.convention(impl)
        operator = OPERATORS.get(decision.op_name)
        return build.direct(operator, impl, convention, build.CALL, impl.fn, None)(*args, **kwargs)

    # ---------------------------------------------------------------- decisions

    def _decide(self, op_name: str, scope: str | None, policy: SelectionPolicy) -> Decision:
        impls = self._registry.get_implementations(op_name)
        if not impls:
            raise NoImplementationError(op_name, [f"nobody registered an operator '{op_name}'"])
        return select(
            op_name,
            impls,
            policy,
            scope=scope,
            available=self._availability,
            banned=self.failures.as_a_whole,
            facts=self._facts,
        )

    def _availability(self, impl: OpImpl) -> tuple[bool, str]:
        answer = self._available.get(impl)
        if answer is None:
            answer = self._available[impl] = impl.availability()
        return answer

    def _selected(self, op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpImpl:
        self.ensure_initialized()
        decision = self._decide(op_name, None, self._table().policy)
        if not args and not kwargs:
            if decision.chosen is None:
                raise NoImplementationError(op_name, decision.reasons())
            return decision.chosen
        call = self._call_of(op_name, None, args, kwargs)
        reasons = []
        for impl in recovery.candidates(decision, call):
            reason = recovery.refusal(self, impl, call)
            if not reason:
                return impl
            reasons.append(f"{impl.impl_id}: {reason}")
        raise NoImplementationError(op_name, [*reasons, *decision.skipped_reasons()])

    def _call_of(self, op_name: str, scope: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        operator = OPERATORS.get(op_name)
        if operator is not None and _is_layer_first(operator, args):
            return Call(op_name, operator, scope, (), build.from_layer(operator, args[0], args[1:], kwargs), args[0])
        return Call(op_name, operator, scope, args, kwargs)

    def _owner_of(self, fn: Callable[..., Any], candidates: tuple[OpImpl, ...]) -> OpImpl:
        """Whose function raised: a bare function names its implementation, a generated one runs the first candidate."""
        for impl in candidates:
            if fn is impl.fn or fn is self._wrapped.get(impl):
                return impl
        return candidates[0]

    def _check_orders(self, policy: SelectionPolicy) -> None:
        for key, order in policy.per_op_order:
            op_name, _, scope = key.partition("@")
            impls = self._registry.get_implementations(op_name)
            if not impls:
                logger.warning(
                    "The per-op order of '%s' (%s) has no effect: nobody registered such an operator", op_name, policy.origin("per_op_order")
                )
                continue
            decision = self._decide(op_name, scope or None, policy)
            if not decision.candidates:
                raise ConfigError(
                    str(policy.origin("per_op_order")),
                    key,
                    f"the order {', '.join(order)} leaves no implementation to run:\n  " + "\n  ".join(decision.reasons()),
                )

    # ---------------------------------------------------------------- counting

    def _function(self, impl: OpImpl) -> Callable[..., Any]:
        if not self._counting:
            return impl.fn
        wrapped = self._wrapped.get(impl)
        if wrapped is None:
            by_thread = self._counters.setdefault((impl.op_name, impl.impl_id), {})
            wrapped = self._wrapped[impl] = _counted(impl.fn, by_thread)
        return wrapped

    # ---------------------------------------------------------------- changes from elsewhere

    def _on_registration(self, op_names: frozenset[str]) -> None:
        if self._root.settled:
            self.republish(op_names)

    def _on_policy_change(self) -> None:
        with self._lock:
            self.failures.clear()
            if self._root.settled:
                self.republish(None)

    def _retire(self) -> None:
        """Another manager becomes the default one and takes over its table."""
        self._root = PrivateTable()
        self._root.owner = self
        self._tables = weakref.WeakSet()

    def _after_fork(self) -> None:
        """In a forked child: new locks, and tables rebuilt at the next call, since a writer may have been half-way."""
        self._lock = threading.RLock()
        self._registry._after_fork()
        self.failures._after_fork()
        for table in self._all_tables():
            table.unsettle()


_Key = tuple[str, str, str | None, str]


def _counted(fn: Callable[..., Any], by_thread: dict[int, int]) -> Callable[..., Any]:
    get_ident = threading.get_ident

    def counted(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        by_thread[thread] = by_thread.get(thread, 0) + 1  # only this thread writes this key
        return fn(*args, **kwargs)

    return counted


def _parse(key: str) -> tuple[str, str | None, bool]:
    """A table key's operator, scope, and whether it is the layer-first form."""
    op_name, at, scope = key.partition("@")
    if at:
        return op_name, scope or None, False
    return op_name.removesuffix(":layer"), None, op_name.endswith(":layer")


def _is_layer_first(operator: Operator, args: tuple[Any, ...]) -> bool:
    return operator.layer is not None and bool(args) and args[0] is not None and not isinstance(args[0], _Tensor)


def _start_root() -> None:
    get_default_manager().ensure_initialized()


_start_root._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo runs it at trace time


def _starter(root: DispatchTable) -> Callable[[], None]:
    return _start_root if root is ROOT else root.owner.ensure_initialized


def _recover(
    key: str, table: DispatchTable, fn: Callable[..., Any], error: Exception, args: tuple[Any, ...], kwargs: Any
) -> Any:
    if type(error) is Settled:
        raise error.error
    return table.owner.recover(key, table, fn, error, args, kwargs)


def _call(root: DispatchTable, op_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: str | None = None) -> Any:
    """A call through any manager's table; :func:`call_op` is the same for the default one, unrolled."""
    if not root.settled:
        root.owner.ensure_initialized()
    table = root if root.plain else root.current
    if key is None:
        key = op_name
        operator = OPERATORS.get(op_name)
        if operator is not None and _is_layer_first(operator, args):
            key = f"{op_name}:layer"
    fn = table.entries.get(key)
    if fn is None:
        raise NoImplementationError(op_name, [f"nobody registered an operator '{op_name}'"])
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        failure = error
    return _recover(key, table, fn, failure, args, kwargs)


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator through the best implementation that the policy in force allows.

    Args:
        op_name: the operator.
        args, kwargs: its arguments, tensors first (``call_op("rms_norm", x, residual, weight, epsilon)``) or with a layer
            first (``call_op("rms_norm", layer, x, residual)``). Positional arguments are faster.

    Returns:
        What the implementation returns.

    Raises:
        NoImplementationError: no implementation is allowed, available and fit for the arguments.
        Exception: what the implementation raised, if no other one could take over.

    >>> import torch
    >>> call_op("silu_and_mul", torch.zeros(1, 4))
    tensor([[0., 0.]])
    """
    table = ROOT
    if not table.plain:
        if not table.settled:
            _start_root()
        table = table.current
    key = op_name
    if args and type(args[0]) is not _Tensor:
        key = _unusual(op_name, args)
    fn = table.entries.get(key)
    if fn is None:
        raise NoImplementationError(op_name, [f"nobody registered an operator '{op_name}'"])
    try:
        if kwargs:
            return fn(*args, **kwargs)
        return fn(*args)
    except Exception as error:
        failure = error
    return _recover(key, table, fn, failure, args, kwargs)


def _unusual(op_name: str, args: tuple[Any, ...]) -> str:
    operator = OPERATORS.get(op_name)
    return f"{op_name}:layer" if operator is not None and _is_layer_first(operator, args) else op_name


def resolve_op(op_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The implementation that :func:`call_op` would run; see :meth:`OpManager.resolve`."""
    return get_default_manager().resolve(op_name, *args, **kwargs)


def bind_op(op_name: str, scope: str | None = None) -> Callable[..., Any]:
    """A function with the operator's signature that dispatches at every call, at the lowest cost.

    Args:
        op_name: the operator.
        scope: the layer that it is bound for, such as ``model.layers.3.input_layernorm``; policies and bans can name it.

    >>> import torch
    >>> bind_op("silu_and_mul")(torch.zeros(1, 4))
    tensor([[0., 0.]])
    """
    return get_default_manager().bind(op_name, scope)


def explain(op_name: str, *args: Any, scope: str | None = None, **kwargs: Any) -> Decision:
    """Which implementation of an operator runs, and why; see :meth:`OpManager.explain`."""
    return get_default_manager().explain(op_name, *args, scope=scope, **kwargs)


_default: OpManager | None = None


def get_default_manager() -> OpManager:
    """The process's manager, which :func:`call_op` uses."""
    global _default
    manager = _default
    if manager is None:
        with _starting:
            manager = _default
            if manager is None:
                manager = OpManager(table=ROOT)
                policies = PolicyManager.get_instance()
                policies.on_table = manager.adopt
                for table in policies.tables():
                    manager.adopt(table)
                _default = manager
    return manager


def reset_default_manager() -> None:
    """Forget registrations, bans, counts and settings; the next use starts anew. Bound operators and contexts follow."""
    global _default
    with _starting:
        old, _default = _default, None
        PolicyManager.get_instance().reread_settings()
        ROOT.unsettle()
        for table in PolicyManager.get_instance().tables():
            table.unsettle()
        if old is not None:
            old._retire()
        get_default_manager()


def _policy_changed() -> None:
    for manager in list(_managers):
        manager._on_policy_change()


def _before_fork() -> None:
    # A start imports backends, and an import that a fork cuts in half cannot be repeated in the child: let it end.
    global _held_at_fork
    _held_at_fork = _starting.acquire(timeout=10)


def _after_fork_in_parent() -> None:
    if _held_at_fork:
        _starting.release()


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.RLock()
    PolicyManager.get_instance()._after_fork()
    for manager in list(_managers):
        manager._after_fork()


PolicyManager.get_instance().on_change = _policy_changed
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
