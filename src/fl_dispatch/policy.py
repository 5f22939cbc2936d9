"""The selection policy in force, globally and in contexts.

A context belongs to its thread or task. The context variable holds the dispatch *table* of the context's policy
(see :mod:`fl_dispatch.run.table`), so that a call reads one attribute and no policy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from .errors import ConfigError
from .global_policy import GLOBAL
from .locking import writers
from .manager.process import ROOT, admit_policy, change_policy, reread_settings, table_for
from .run.table import DispatchTable, context_table
from .settings import load_config_file, peek_settings, reset_settings
from .settings.origins import CODE
from .settings.selection_policy import (
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    VALID_PREFER_VALUES,
    SelectionPolicy,
)


def policy_from_config(config_path: str | os.PathLike[str]) -> SelectionPolicy:
    """Read a policy from a YAML config file; missing items have their built-in defaults.

    Raises:
        ConfigError: the file is missing (then also a ``FileNotFoundError``), unreadable or wrong.
    """
    return load_config_file(config_path).policy


def get_policy() -> SelectionPolicy:
    """Return the policy in force here: the innermost context's, else the global one."""
    table = context_table.get(ROOT)
    return table.policy if table.of_context else GLOBAL.get()


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Replace the global policy, lift all bans, and return the previous policy.

    An interrupted change has no effect.

    Raises:
        DispatchFrozenError: the policy would change a frozen choice.
    """
    _check_type(policy)
    with writers:
        before = GLOBAL.get()
        admit_policy("the global policy", policy)
        change_policy(policy)
    return before


def reset_global_policy() -> None:
    """Read the settings again (config file, environment, platform file) and let them decide.

    Raises:
        DispatchFrozenError: the settings would change a frozen choice.
    """
    with writers:
        admit_policy("the settings", peek_settings().policy)
        reset_settings()
        change_policy(None)


def get_policy_epoch() -> int:
    """Return a number that grows with every change of the global policy."""
    return GLOBAL.epoch


class PolicyManager:
    """The functions of this module and the global policy, as one object per process."""

    _instance: PolicyManager | None = None

    @classmethod
    def get_instance(cls) -> PolicyManager:
        """Return the process's policy manager."""
        with writers:
            cls._instance = cls._instance or cls()
        return cls._instance

    get_policy = staticmethod(get_policy)
    get_global_policy = staticmethod(GLOBAL.get)
    set_global_policy = staticmethod(set_global_policy)
    reset_global_policy = staticmethod(reset_global_policy)
    reread_settings = staticmethod(reread_settings)
    get_policy_epoch = staticmethod(get_policy_epoch)


def _check_type(policy: SelectionPolicy) -> None:
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"a SelectionPolicy is needed, not {type(policy).__name__}")


class _Entered:
    """An entered policy context; a class, because two contexts may share one table."""

    __slots__ = ("table",)

    def __init__(self, table: DispatchTable) -> None:
        self.table = table


_open: ContextVar[tuple[_Entered, ...]] = ContextVar("fl_dispatch_open_contexts", default=())
"""The policy contexts open here, innermost last. A task keeps the contexts that are open when it starts."""


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Use a policy inside the ``with`` block, in this thread or task only.

    Raises:
        DispatchFrozenError: dispatch is frozen, and the policy would change a frozen choice.
    """
    _check_type(policy)
    admit_policy("a policy context", policy, bans=True)
    ROOT.note_context()
    entered = _Entered(table_for(policy))
    _open.set((*_open.get(), entered))
    context_table.set(entered.table)
    try:
        yield policy
    finally:
        rest = tuple(other for other in _open.get() if other is not entered)  # generators may exit in any order
        _open.set(rest)
        context_table.set(rest[-1].table if rest else ROOT)


def _changed(**changes: Any) -> SelectionPolicy:
    policy = get_policy()
    origins = {**policy.origins, **dict.fromkeys(changes, CODE)}
    return replace(policy, **changes, origins=origins)


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
    """Allow only these vendors inside the ``with`` block, replacing the list in force; without arguments, none."""
    with policy_context(_changed(allow_vendors=frozenset(vendors))) as policy:
        yield policy


@contextmanager
def with_denied_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Deny these vendors as well inside the ``with`` block, adding to the list in force."""
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
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
