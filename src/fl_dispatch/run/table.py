"""Operator → function for one policy: the only thing that a call reads.

``entries`` never changes what a key (see :mod:`.keys`) means; writers replace it as a whole, or add a key, so readers
take no lock.

A *root table* is a manager's table for the global policy. A policy context puts another table into ``context_table``,
and ``DispatchTable.current`` reads it: a property with ``ContextVar.get`` itself as its getter, called with the table
as its default. That is one attribute read, and Dynamo can trace and guard it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from ..selection.decision import Decision
from ..settings.selection_policy import SelectionPolicy
from ..state import State

context_table: ContextVar[DispatchTable] = ContextVar("fl_dispatch_context_table")
"""The table of the policy context that is open here; unset where none was."""


MADE_FROM = "fl_decision"
"""An attribute of generated entries: the decision, for a call that runs while its entry is replaced."""


class Plan(NamedTuple):
    """The facts that one entry was made from.

    Args:
        op_name: the operator.
        scope: the layer that it was bound for.
        decision: who may run, best first.
        entry: the function in the table.
        declined: what a trace goes on with when the first candidate declines while it is traced.
    """

    op_name: str
    scope: str | None
    decision: Decision
    entry: Callable[..., Any]
    declined: Callable[..., Any]


class DispatchTable:
    """The functions that calls run under one policy.

    Args:
        start: brings the table's manager up; called when a root table is stale.
        policy: the policy of a context's table.

    Attributes:
        policy: the policy that the functions were chosen for (unset on a root table until its manager starts).
        entries: key → function.
        plans: key → what the function was made from.
        recipes: what entries have in common with others, see :func:`~fl_dispatch.run.plan.build`.
        stale: the entries are not complete, or out of date.
        of_context: it is a policy context's, and no root.
        contexts_used: callers read ``current``, because there may be a policy context.
        plain: not stale, and no policy context was ever entered in this process, so that ``current`` need not be read.
        state: of the manager that fills it.
        used: the number of the last use by a context.
    """

    __slots__ = (
        "__weakref__",
        "contexts_used",
        "entries",
        "of_context",
        "plain",
        "plans",
        "policy",
        "recipes",
        "stale",
        "start",
        "state",
        "used",
    )

    policy: SelectionPolicy
    state: State

    def __init__(self, start: Callable[[], None], policy: SelectionPolicy | None = None) -> None:
        self.start = start
        self.of_context = policy is not None
        if policy is not None:
            self.policy = policy
        self.entries: dict[str, Callable[..., Any]] = {}
        self.plans: dict[str, Plan] = {}
        self.recipes: dict[Any, Any] = {}
        self.used = 0
        self.stale = True
        self.contexts_used = False
        self.plain = False

    current = property(context_table.get)

    def publish(self, plans: dict[str, Plan], recipes: dict[Any, Any]) -> None:
        """Make a complete set of entries visible to callers."""
        entries = {key: plan.entry for key, plan in plans.items()}
        self.plans, self.recipes = plans, recipes
        self.entries = entries
        self.stale = False
        self.plain = not self.contexts_used

    def add(self, plans: dict[str, Plan]) -> None:
        """Make entries visible that had none before."""
        self.plans.update(plans)
        self.entries.update({key: plan.entry for key, plan in plans.items()})

    def mark_stale(self) -> None:
        """The entries are out of date: the next call has them rebuilt first."""
        self.plain = False
        self.stale = True

    def note_context(self) -> None:
        """A policy context is about to be entered: from now on callers read ``current``."""
        self.contexts_used = True
        self.plain = False
