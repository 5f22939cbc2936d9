"""The process's manager, and what concerns all managers: policy changes, freezing, forks."""

from __future__ import annotations

import os
from collections.abc import Callable

from .calls import bind_op, call_op, explain, resolve_op
from .errors import DispatchFrozenError
from .freezing import Manifest, frozen_ones
from .locking import writers
from .op_manager import OpManager, managers
from .policy import PolicyManager, SelectionPolicy, policy_from_settings
from .settings import peek_settings
from .table import ROOT

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
        _admit_policy("the settings", lambda: policy_from_settings(peek_settings()), False)
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
    with writers:
        return get_default_manager().freezer.freeze()


def thaw_dispatch() -> None:
    """Allow changes again. Operators that were bound while dispatch was frozen stay what they are."""
    get_default_manager().freezer.thaw()


def _start_root() -> None:
    get_default_manager().ensure_initialized()


def _policy_changed() -> None:
    with writers:
        stale = list(managers)
        try:
            while stale:
                stale[-1].on_policy_change()
                stale.pop()
        finally:  # interrupted in an availability check, say: the next call of each builds anew
            for manager in stale:
                manager.failures.clear()
                manager.tables.unsettle()


def _admit_policy(change: str, policy: Callable[[], SelectionPolicy], bans: bool) -> None:
    for freezer in frozen_ones():
        freezer.admit(change, policy(), bans=bans)


def _after_fork_in_child() -> None:
    for manager in list(managers):
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
