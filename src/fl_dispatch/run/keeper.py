"""Keep a manager's tables complete and up to date: the root, and one for each policy of a context."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..global_policy import GLOBAL
from ..locking import writers
from ..settings.selection_policy import SelectionPolicy
from ..state import State
from .keys import Key, bound_key, keys_of
from .plan import Shared, build
from .table import DispatchTable, Plan, context_table

KEPT_TABLES = 1024
"""Policies with tables kept for a next context; beyond this number the least recently used table is dropped."""
KEPT_UP_TO_DATE = 64
"""Kept tables that are rebuilt on a change; the others are dropped, and built again on demand."""


class TableKeeper:
    """The tables of one manager.

    Args:
        state: the knowledge from which entries are made.
        root: the table for the global policy.

    Attributes:
        _live: the tables of policy contexts, as long as a context refers to them.
        _by_policy: the tables of recent policies, for the next context with one of them.
        _shared: recipes that tables share.
        _uses: counts the uses of tables by contexts.
    """

    def __init__(self, state: State, root: DispatchTable) -> None:
        self._state = state
        self._by_policy: dict[object, DispatchTable] = {}
        self._live: weakref.WeakSet[DispatchTable] = weakref.WeakSet()
        self._shared = Shared()
        self._uses = itertools.count()
        self._take(root)

    def bind(self, op_name: str, scope: str) -> str:
        """Add entries for a bound operator to every table, present and future; return their key."""
        key = bound_key(op_name, scope)
        with writers:
            scopes = self._state.scopes.setdefault(op_name, set())
            if scope not in scopes:
                scopes.add(scope)
                for table in self._all():
                    if not table.stale:
                        table.add(build(self._state, self.policy_of(table), [key], table.recipes, self._shared))
        return key.text

    def table_for(self, policy: SelectionPolicy) -> DispatchTable:
        """Return the table for a context with this policy; take a lock only if the policy is new."""
        key = policy, tuple(sorted((name, str(origin)) for name, origin in policy.origins.items()))
        table = self._by_policy.get(key)
        if table is None:
            with writers:
                table = self._by_policy.get(key)
                if table is None:
                    table = DispatchTable(self.root.start, policy)
                    self.adopt(table)
                    if len(self._by_policy) >= KEPT_TABLES:
                        self._keep(KEPT_TABLES * 7 // 8)
                    self._by_policy[key] = table
        table.used = next(self._uses)
        return table

    def _keep(self, count: int) -> None:
        """Drop all tables except the ``count`` that contexts used last; a table with an open context lives on."""
        if len(self._by_policy) > count:
            last = sorted(self._by_policy.items(), key=lambda item: item[1].used)[-count:]
            self._by_policy = dict(last)

    def adopt(self, table: DispatchTable) -> None:
        """Fill a context's table, and keep it up to date as long as it lives."""
        with writers:
            table.state = self._state
            self._live.add(table)
            if not self.root.stale:
                self._fill(table)

    def context_tables(self) -> list[DispatchTable]:
        """Return the contexts' tables that are alive."""
        with writers:
            return list(self._live)

    def retire(self, successor: TableKeeper, root: DispatchTable) -> None:
        """Hand bound scopes, root table and contexts' tables to another manager's keeper; go on with ``root``."""
        successor._state.scopes = {op: set(scopes) for op, scopes in self._state.scopes.items()}
        for table in self.context_tables():
            successor.adopt(table)
        successor._by_policy, self._by_policy = self._by_policy, {}
        self._live = weakref.WeakSet()
        self._take(root)

    def rebuild(self, op_names: Iterable[str] | None) -> None:
        """Rebuild the entries of some operators, or of all, in every table."""
        with writers:
            op_names = None if op_names is None else [*op_names]
            self._keep_or_forget(op_names)
            try:
                for table in self._all():
                    if op_names is None or table.stale:
                        self._fill(table)
                    else:
                        self._refresh(table, op_names)
            except BaseException:  # for example a user's interrupt in an availability check
                self.mark_stale()
                raise

    def _keep_or_forget(self, op_names: list[str] | None) -> None:
        """Drop shared recipes before a rebuild, and drop unused tables instead of rebuilding them."""
        self._shared.forget(op_names)
        if op_names is None:
            self._by_policy = {}
        else:
            self._keep(KEPT_UP_TO_DATE)

    def rebuild_root(self) -> None:
        """Rebuild only the root table, because the global policy changed."""
        with writers:
            self._fill(self.root)

    def mark_stale(self) -> None:
        """Mark all tables for a rebuild at the next call."""
        for table in self._all():
            table.mark_stale()

    def policy_of(self, table: DispatchTable) -> SelectionPolicy:
        """Return the policy of a table's entries; while dispatch is frozen, one that is admitted."""
        admitted = table is self.root or self._state.fixed.allows(table.policy)
        return table.policy if admitted else self.root.policy

    def _take(self, root: DispatchTable) -> None:
        root.state = self._state
        if isinstance(root, PrivateTable):
            root.keeper = self
        root.mark_stale()
        self.root = root

    def _all(self) -> list[DispatchTable]:
        return [*self._live, self.root]  # the root last: if it is not stale, no table is

    def _keys(self, op_name: str) -> list[Key]:
        return keys_of(op_name, self._state.scopes.get(op_name, ()))

    def _fill(self, table: DispatchTable) -> None:
        """Publish the plans of all operators in a table."""
        if table is self.root:
            table.policy = GLOBAL.get()
        registry, impls = self._state.registry, None
        plans: dict[str, Plan] = {}
        recipes: dict[Any, Any] = {}
        while impls is not registry.snapshot().impls_by_op:  # an availability check may register an implementation
            impls = registry.snapshot().impls_by_op
            keys, recipes = [key for op in impls for key in self._keys(op)], {}
            plans = build(self._state, self.policy_of(table), keys, recipes, self._shared)
        if table.state is self._state:
            table.publish(plans, recipes)

    def _refresh(self, table: DispatchTable, op_names: list[str]) -> None:
        """Publish new plans of some operators in a table."""
        keys = [key for op in op_names for key in self._keys(op)]
        recipes = {place: recipe for place, recipe in table.recipes.items() if place[0] not in op_names}
        fresh = build(self._state, self.policy_of(table), keys, recipes, self._shared)
        asked = {key.text for key in keys}
        kept = {key: plan for key, plan in table.plans.items() if key not in asked}
        if table.state is self._state:
            table.publish({**kept, **fresh}, recipes)  # a key without a new plan is removed


class PrivateTable(DispatchTable):
    """Root table of a manager other than the process's; it looks up its context tables by policy."""

    __slots__ = ("keeper",)

    keeper: TableKeeper

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__(start)
        self.contexts_used = True  # contexts are entered at the process's root, which does not notify this table

    @property
    def current(self) -> DispatchTable:
        """Return the table that a call here reads."""
        in_force = context_table.get(self)
        return self.keeper.table_for(in_force.policy) if in_force.of_context else self
