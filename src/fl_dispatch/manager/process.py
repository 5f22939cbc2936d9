"""The process's manager, its root table, and changes that concern all managers: policy changes, freezing, forks."""

from __future__ import annotations

import os
from functools import partial

from ..compiled import views
from ..compiled.freezing import frozen_states
from ..compiled.manifest import Manifest
from ..errors import DispatchFrozenError
from ..global_policy import GLOBAL
from ..locking import writers
from ..run.keeper import PrivateTable
from ..run.table import DispatchTable
from ..settings import peek_settings, reset_settings
from ..settings.selection_policy import SelectionPolicy
from .op_manager import OpManager, managers

_default: OpManager | None = None


def _start_root() -> None:
    while True:
        manager = get_default_manager()
        manager.ensure_initialized()
        if manager.table_keeper.root is ROOT:  # unless another manager took over meanwhile
            return


_start_root._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo runs it at trace time
ROOT = DispatchTable(_start_root)
"""The table of the process's manager for the global policy; it stays the same object when the manager is replaced."""


def get_default_manager() -> OpManager:
    """Return the process's manager, which :func:`fl_dispatch.call_op` uses."""
    global _default
    manager = _default
    if manager is None:
        with writers:
            manager = _default = _default or OpManager(root=ROOT, view=partial(views.view, ROOT))
    return manager


def table_for(policy: SelectionPolicy) -> DispatchTable:
    """Return the table of the process's manager for a context with this policy."""
    while True:
        tables = get_default_manager().table_keeper
        table = tables.table_for(policy)
        if tables.root is ROOT:  # unless another manager took over meanwhile
            return table


def reset_default_manager() -> None:
    """Drop registrations, bans, counts and settings; the next use starts anew. Bound operators and contexts stay valid.

    Raises:
        DispatchFrozenError: dispatch is frozen.
    """
    global _default
    with writers:
        old = _default
        admit_policy("the settings", peek_settings().policy)
        if old is not None and old.frozen:
            raise DispatchFrozenError("a new manager", ["everything is asked anew"])
        _default = None
        reread_settings()
        new = get_default_manager()
        if old is not None:
            old.table_keeper.retire(new.table_keeper, PrivateTable(old.ensure_initialized))
        new.table_keeper.mark_stale()
        for manager in list(managers):
            manager.on_policy_change()


def freeze_dispatch(compiling: bool = True) -> Manifest:
    """Fix the implementation of every operator and bound layer from here on, for hosts that compile or capture.

    From then on :func:`bind_op` returns the bare implementation, and an implementation's failure is raised, because no
    other may take over. A change of the policy (also a context), registrations, bans or facts that would alter a choice
    raises :class:`DispatchFrozenError` and changes nothing. Idempotent.

    Args:
        compiling: whether ``torch.compile`` comes next, so that trials run now for implementations that Dynamo may
            trace.

    Returns:
        The manifest: what runs, why, and a hash. Processes with the same choices have equal hashes.

    >>> manifest = freeze_dispatch()
    >>> sorted(manifest.choices)[0], len(manifest.hash)
    ('attention_backend', 16)
    >>> thaw_dispatch()
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    return manager.freezer.freeze(compiling)


def thaw_dispatch() -> None:
    """Allow changes again. Operators that were bound while dispatch was frozen keep their implementations."""
    get_default_manager().freezer.thaw()


# ---- policies


def admit_policy(change: str, policy: SelectionPolicy, *, bans: bool = False) -> None:
    """Raise :class:`DispatchFrozenError` if a policy would change a frozen choice of any manager."""
    for state in frozen_states():
        state.fixed.require_allowed(change, policy, bans=bans)


def change_policy(policy: SelectionPolicy | None) -> None:
    """Replace the global policy in all managers, or in none; with ``None`` the settings decide."""
    with writers:
        before, changed = GLOBAL.replace(policy), []
        try:
            for manager in list(managers):
                changed.append(manager.on_policy_change())
        except BaseException:
            GLOBAL.restore(before)
            for take_back in changed:
                take_back()
            raise


def reread_settings() -> None:
    """Read the settings again; a global policy that was set in code stays."""
    with writers:
        reset_settings()
        if GLOBAL.from_settings:
            GLOBAL.replace(None)


def _after_fork_in_child() -> None:
    for manager in list(managers):
        manager.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
