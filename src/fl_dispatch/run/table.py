"""Operator → function for one policy: the only thing that a call reads.

``entries`` is never changed in place; writers replace it as a whole, so readers take no lock. Its keys are ``op`` (a
call by name), ``op@scope`` (a bound operator; the scope may be empty) and ``op:layer`` (a call with a layer first).

``ROOT`` is the default manager's table for the global policy. A policy context puts another table into
``scope_variable``, and ``DispatchTable.current`` reads it: a property whose getter is ``ContextVar.get`` itself, called
with the table as its default. That is one attribute read, and one that Dynamo can trace and guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..op_manager import OpManager
    from ..selection.decision import Decision
    from ..selection.selection_policy import SelectionPolicy

scope_variable: ContextVar[DispatchTable] = ContextVar("fl_dispatch_scope")


class Built(NamedTuple):
    """What a table holds, by key.

    Args:
        entries: the functions.
        decisions: what they were made from.
        declined: what a trace goes on with when the first candidate declines while it is traced.
    """

    entries: dict[str, Callable[..., Any]]
    decisions: dict[str, Decision]
    declined: dict[str, Callable[..., Any]]


class DispatchTable:
    """The functions that calls run under one policy.

    Attributes:
        policy: the policy that they were chosen for (unset on a root table until its manager starts).
        entries: key → function.
        decisions: key → why; what ``entries`` was made from.
        declined: see :class:`Built`.
        settled: the entries are complete and up to date.
        plain: settled, and no policy context was ever entered in this process, so that ``current`` need not be read.
        owner: the manager that fills it.
        start: on a root table, brings its manager up; called when the table is not settled.
    """

    __slots__ = (
        "__weakref__",
        "decisions",
        "declined",
        "entries",
        "owner",
        "plain",
        "policy",
        "scoped",
        "settled",
        "start",
    )

    policy: SelectionPolicy
    owner: OpManager
    start: Callable[[], None]

    def __init__(self, policy: SelectionPolicy | None = None) -> None:
        if policy is not None:
            self.policy = policy
        self.entries: Mapping[str, Callable[..., Any]] = {}
        self.decisions: Mapping[str, Decision] = {}
        self.declined: Mapping[str, Callable[..., Any]] = {}
        self.settled = False
        self.scoped = False
        self.plain = False

    current = property(scope_variable.get)

    def publish(self, built: Built) -> None:
        """Make a complete set of entries visible to callers."""
        self.decisions, self.declined = built.decisions, built.declined
        self.entries = built.entries
        self.settled = True
        self.plain = not self.scoped

    def unsettle(self) -> None:
        """The entries are out of date: the next call has them rebuilt first."""
        self.plain = False
        self.settled = False

    def scope(self) -> None:
        """A policy context is about to be entered: from now on callers read ``current``."""
        self.scoped = True
        self.plain = False


class PrivateTable(DispatchTable):
    """Root table of a manager that is not the default one: its context tables are looked up by policy."""

    __slots__ = ()

    def __init__(self, owner: OpManager) -> None:
        super().__init__()
        self.owner = owner
        self.start = owner.ensure_initialized
        self.scoped = True

    @property
    def current(self) -> DispatchTable:
        return self.owner.tables.for_context()


ROOT = DispatchTable()
