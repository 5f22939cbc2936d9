"""What is wanted now: the selection policy in force, globally and in contexts.

A context belongs to its thread or task. What the context variable holds is the dispatch *table* of the context's policy
(see :mod:`fl_dispatch.table`), so that a call reads one attribute and no policy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .errors import ConfigError
from .locking import writers
from .selection_policy import (
    CODE,
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    VALID_PREFER_VALUES,
    SelectionPolicy,
)
from .settings import Origin, Settings, get_settings, load_config_file, peek_settings, reset_settings
from .table import ROOT, DispatchTable, scope_variable


def policy_from_settings(settings: Settings) -> SelectionPolicy:
    """The policy that the user's settings ask for."""
    renamed = {
        "reference_only": "enabled",
        "flaggems_allow": "flagos_whitelist",
        "flaggems_deny": "flagos_blacklist",
    }
    names = [name for name in SelectionPolicy.__dataclass_fields__ if name != "origins"]
    values = {name: getattr(settings, renamed.get(name, name)) for name in names}
    values["reference_only"] = not settings.enabled
    origins = {name: settings.origin(renamed.get(name, name)) for name in names}
    origins |= {name: origin for name, origin in settings.origins.items() if name.startswith("per_op_order.")}
    return SelectionPolicy(**values, origins=MappingProxyType(origins))


def policy_from_config(config_path: str | os.PathLike[str]) -> SelectionPolicy:
    """The policy that a YAML config file describes; items that it lacks have their built-in default.

    Raises:
        ConfigError: the file is missing (then also a ``FileNotFoundError``), unreadable or wrong.
    """
    return policy_from_settings(load_config_file(config_path))


class PolicyManager:
    """Owner of the global policy and of the tables that policy contexts use. One a process."""

    _instance: PolicyManager | None = None
    KEPT_TABLES = 64  # policies whose tables are kept for the next context with the same policy

    def __init__(self) -> None:
        self._global: SelectionPolicy | None = None
        self._from_settings = True
        self._epoch = 0
        self._kept: dict[tuple[SelectionPolicy, frozenset[tuple[str, Origin]]], DispatchTable] = {}
        self._live: weakref.WeakSet[DispatchTable] = weakref.WeakSet()
        self.on_change: Callable[[], None] = lambda: None
        self.on_table: Callable[[DispatchTable], None] = lambda table: None
        self.admit: Callable[[str, Callable[[], SelectionPolicy], bool], None] = lambda change, policy, bans: None

    @classmethod
    def get_instance(cls) -> PolicyManager:
        """The process's policy manager."""
        if cls._instance is None:
            with writers:
                cls._instance = cls._instance or cls()
        return cls._instance

    def get_policy(self) -> SelectionPolicy:
        """The policy in force here: the innermost context's, else the global one."""
        table = scope_variable.get(ROOT)
        return self.get_global_policy() if table is ROOT else table.policy

    def get_global_policy(self) -> SelectionPolicy:
        """The global policy; read from the settings when nobody set one.

        Raises:
            ConfigError: the settings are wrong.
        """
        policy = self._global
        if policy is None:
            with writers:
                policy = self._global = self._global or policy_from_settings(get_settings())
        return policy

    def set_global_policy(self, policy: SelectionPolicy) -> SelectionPolicy:
        """Replace the global policy; returns the one before.

        Raises:
            DispatchFrozenError: it would change what is frozen.
        """
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"a SelectionPolicy is needed, not {type(policy).__name__}")
        with writers:
            before = self.get_global_policy()
            self.admit("the global policy", lambda: policy, False)
            self._global, self._from_settings = policy, False
            self._epoch += 1
            self.on_change()
        return before

    def reread_settings(self) -> None:
        """Read the settings again; a global policy that was set in code stays."""
        with writers:
            reset_settings()
            if self._from_settings:
                self._global = None
                self._epoch += 1

    def reset_global_policy(self) -> None:
        """Read the settings again and let them decide.

        Raises:
            DispatchFrozenError: they would change what is frozen.
        """
        with writers:
            self.admit("the settings", lambda: policy_from_settings(peek_settings()), False)
            reset_settings()
            self._global, self._from_settings = None, True
            self._epoch += 1
            self.on_change()

    def get_policy_epoch(self) -> int:
        """A number that grows with every change of the global policy."""
        return self._epoch

    def table_for(self, policy: SelectionPolicy) -> DispatchTable:
        """The default manager's table for a context with this policy, from the same places."""
        key = policy, frozenset(policy.origins.items())
        table = self._kept.get(key)
        if table is None:
            with writers:
                table = self._kept.get(key)
                if table is None:
                    table = DispatchTable(policy)
                    self._live.add(table)
                    self.on_table(table)
                    while len(self._kept) >= self.KEPT_TABLES:
                        del self._kept[next(iter(self._kept))]
                    self._kept[key] = table
        return table

    def tables(self) -> list[DispatchTable]:
        """The tables that contexts use or may use again."""
        with writers:
            return list(self._live)


def get_policy() -> SelectionPolicy:
    """The policy in force here: the innermost context's, else the global one."""
    return PolicyManager.get_instance().get_policy()


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Replace the global policy; returns the one before. Lifts bans of failed implementations.

    Raises:
        DispatchFrozenError: it would change what is frozen.
    """
    return PolicyManager.get_instance().set_global_policy(policy)


def reset_global_policy() -> None:
    """Read the settings again (config file, environment, platform file) and let them decide."""
    PolicyManager.get_instance().reset_global_policy()


def get_policy_epoch() -> int:
    """A number that grows with every change of the global policy."""
    return PolicyManager.get_instance().get_policy_epoch()


class _Entered:
    """A policy context that was entered, an object of its own because two may have one table."""

    __slots__ = ("table",)

    def __init__(self, table: DispatchTable) -> None:
        self.table = table


_open: ContextVar[tuple[_Entered, ...]] = ContextVar("fl_dispatch_open_contexts", default=())
"""The contexts that are open here, innermost last. A task keeps those that are open when it starts."""


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Use a policy inside the ``with`` block, in this thread or task only.

    Raises:
        DispatchFrozenError: dispatch is frozen, and the policy would make something else run.
    """
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"a SelectionPolicy is needed, not {type(policy).__name__}")
    PolicyManager.get_instance().admit("a policy context", lambda: policy, True)
    ROOT.scope()
    entered = _Entered(PolicyManager.get_instance().table_for(policy))
    _open.set((*_open.get(), entered))
    scope_variable.set(entered.table)
    try:
        yield policy
    finally:
        rest = tuple(other for other in _open.get() if other is not entered)  # in generators they end in any order
        _open.set(rest)
        scope_variable.set(rest[-1].table if rest else ROOT)


def _changed(**changes: Any) -> SelectionPolicy:
    policy = get_policy()
    origins = {**policy.origins, **dict.fromkeys(changes, CODE)}
    return replace(policy, **changes, origins=MappingProxyType(origins))


@contextmanager
def with_strict_mode(strict: bool = True) -> Iterator[SelectionPolicy]:
    """Raise an implementation's error unchanged inside the ``with`` block."""
    with policy_context(_changed(strict=strict)) as policy:
        yield policy


@contextmanager
def with_preference(prefer: str) -> Iterator[SelectionPolicy]:
    """Try another kind first inside the ``with`` block.

    Raises:
        ValueError: ``prefer`` is not one of ``VALID_PREFER_VALUES``.
    """
    with policy_context(_changed(prefer=prefer)) as policy:
        yield policy


@contextmanager
def with_allowed_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Allow only these vendors inside the ``with`` block (replacing the list in force); without any, nobody."""
    with policy_context(_changed(allow_vendors=frozenset(vendors))) as policy:
        yield policy


@contextmanager
def with_denied_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Deny these vendors too inside the ``with`` block (adding to the list in force)."""
    with policy_context(_changed(deny_vendors=get_policy().deny_vendors | set(vendors))) as policy:
        yield policy


__all__ = [
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "VALID_PREFER_VALUES",
    "ConfigError",
    "PolicyManager",
    "SelectionPolicy",
    "get_policy",
    "get_policy_epoch",
    "policy_context",
    "policy_from_config",
    "policy_from_settings",
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
