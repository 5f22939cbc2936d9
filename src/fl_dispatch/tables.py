"""Keeps a manager's tables complete and up to date: the root, and one for each policy that contexts use."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from .builder import Key, bound_key, build_entries, keys_of
from .locking import writers
from .policy import PolicyManager
from .selection_policy import SelectionPolicy
from .table import ROOT, Built, DispatchTable, PrivateTable, scope_variable

if TYPE_CHECKING:
    from .op_manager import OpManager

Value = TypeVar("Value")


class TableKeeper:
    """The tables of one manager.

    Args:
        manager: it decides what the entries are.
        root: the table for the global policy; a private one by default.
    """

    def __init__(self, manager: OpManager, root: DispatchTable | None = None) -> None:
        self._manager = manager
        self._scopes: dict[str, frozenset[str]] = {}
        self._contexts: weakref.WeakSet[DispatchTable] = weakref.WeakSet()
        # By the context's table of the default manager: they live as long, and a reader takes no lock.
        self._own_contexts: weakref.WeakKeyDictionary[DispatchTable, DispatchTable] = weakref.WeakKeyDictionary()
        self.root = PrivateTable(manager) if root is None else root
        self.root.owner = manager
        self.root.unsettle()

    def current(self) -> DispatchTable:
        """The table that a call here reads."""
        root: DispatchTable = self.root
        current: DispatchTable = root if root.plain else root.current
        return current

    def scopes(self, op_name: str) -> frozenset[str]:
        """The scopes that an operator was bound for."""
        return self._scopes.get(op_name, frozenset())

    def bind(self, op_name: str, scope: str) -> str:
        """Have entries for a bound operator in every table from now on; returns their key."""
        key = bound_key(op_name, scope)
        with writers:
            if scope not in self.scopes(op_name):
                self._scopes[op_name] = self.scopes(op_name) | {scope}
                for table in self._all():
                    self._refresh(table, [key])
        return key.text

    def republish(self, op_names: Iterable[str] | None) -> None:
        """Rebuild the entries of some operators, or of all, in every table."""
        with writers:
            try:
                for table in self._all():
                    if op_names is None or not table.settled:
                        self._fill(table)
                    else:
                        self._refresh(table, [key for op in op_names for key in keys_of(op, self.scopes(op))])
            except BaseException:  # a user's interrupt in an availability check, say
                self.unsettle()
                raise

    def for_context(self) -> DispatchTable:
        """The table for the policy in force here, of a manager that is not the default one."""
        context = scope_variable.get(ROOT)
        if context is ROOT:
            return self.root
        table = self._own_contexts.get(context)
        if table is None:
            with writers:
                table = self._own_contexts.get(context)
                if table is None:
                    table = DispatchTable(context.policy)
                    self.adopt(table)
                    self._own_contexts[context] = table
        return table

    def adopt(self, table: DispatchTable) -> None:
        """Fill a context's table, and keep it up to date as long as it lives."""
        with writers:
            table.owner = self._manager
            self._contexts.add(table)
            if self.root.settled:
                self._fill(table)

    def retire(self, successor: TableKeeper) -> None:
        """Another manager becomes the default one: it takes over bound scopes, root table and contexts' tables."""
        successor._scopes = dict(self._scopes)
        self.root = PrivateTable(self._manager)
        self._contexts = weakref.WeakSet()

    def unsettle(self) -> None:
        """Have all tables rebuilt at the next call."""
        for table in self._all():
            table.unsettle()

    def _all(self) -> list[DispatchTable]:
        return [*self._contexts, self.root]  # the root last: once it is settled, all are

    def policy_of(self, table: DispatchTable) -> SelectionPolicy:
        """The policy that a table's entries are made for: while dispatch is frozen, one that is admitted."""
        admitted = table is self.root or self._manager.freezer.admits(table.policy)
        return table.policy if admitted else self.root.policy

    def _fill(self, table: DispatchTable) -> None:
        if table is self.root:
            table.policy = PolicyManager.get_instance().get_global_policy()
        registry = self._manager.registry
        impls = None
        while impls is not registry.snapshot().impls_by_op:  # an availability check may register something
            impls = registry.snapshot().impls_by_op
            keys = [key for op in impls for key in keys_of(op, self.scopes(op))]
            built = build_entries(self._manager, self.policy_of(table), keys)
        if table.owner is self._manager:
            table.publish(built)

    def _refresh(self, table: DispatchTable, keys: list[Key]) -> None:
        if not table.settled:
            return
        fresh = build_entries(self._manager, self.policy_of(table), keys)
        asked = {key.text for key in keys}
        if table.owner is self._manager:
            entries = _merged(table.entries, fresh.entries, asked)
            decisions = _merged(table.decisions, fresh.decisions, asked)
            table.publish(Built(entries, decisions, _merged(table.declined, fresh.declined, asked)))


def _merged(old: Mapping[str, Value], new: Mapping[str, Value], asked: Iterable[str]) -> dict[str, Value]:
    """The old values with those of some keys replaced; a key without a new value is gone."""
    kept = {key: value for key, value in old.items() if key not in asked}
    return {**kept, **new}
