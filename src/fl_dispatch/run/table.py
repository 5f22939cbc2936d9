"""Dispatch tables: operator → function for one policy, the only data that a call reads.

Writers replace ``entries`` as a whole or add a key (see :mod:`.keys`), so readers take no lock.

A *root table* is a manager's table for the global policy. A policy context puts another table into ``context_table``,
and ``DispatchTable.current`` reads it: a property with ``ContextVar.get`` as its getter and the table as the default. A
read costs one attribute lookup, and Dynamo can trace and guard it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from ..selection.decision import Decision
from ..settings.selection_policy import SelectionPolicy
from ..state import State

context_table: ContextVar[DispatchTable] = ContextVar("fl_dispatch_context_table")
"""The table of the policy context that is open here; unset if none was entered."""


MADE_FROM = "fl_decision"
"""Attribute of generated entries with the decision, for a call that runs while its entry is replaced."""


class Plan(NamedTuple):
    """The facts from which one entry was made.

    Args:
        op_name: the operator.
        scope: the layer that it was bound for.
        decision: the implementations that may run, best first.
        entry: the function in the table.
        declined: the function with which a trace goes on if the first candidate declines.
    """

    op_name: str
    scope: str | None
    decision: Decision
    entry: Callable[..., Any]
    declined: Callable[..., Any]


class DispatchTable:
    """The functions that calls run under one policy.

    Args:
        start: starts the table's manager; called if a root table is stale.
        policy: the policy of a context's table.

    Attributes:
        policy: the policy that the functions were chosen for (unset on a root table until its manager starts).
        entries: key → function.
        plans: key → the facts from which the function was made.
        recipes: the parts that entries share with others, see :func:`~fl_dispatch.run.plan.build`.
        stale: whether the entries are incomplete or out of date.
        of_context: whether it is a policy context's table, not a root.
        contexts_used: whether callers read ``current``, because there may be a policy context.
        plain: whether callers may skip ``current``: the table is not stale, and this process never entered a policy
            context.
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
        """Publish a complete set of entries to callers."""
        entries = {key: plan.entry for key, plan in plans.items()}
        self.plans, self.recipes = plans, recipes
        self.entries = entries
        self.stale = False
        self.plain = not self.contexts_used

    def add(self, plans: dict[str, Plan]) -> None:
        """Publish entries for new keys."""
        self.plans.update(plans)
        self.entries.update({key: plan.entry for key, plan in plans.items()})

    def mark_stale(self) -> None:
        """Mark the entries as out of date, so that the next call rebuilds them first."""
        self.plain = False
        self.stale = True

    def note_context(self) -> None:
        """Prepare for a policy context: from now on callers read ``current``."""
        self.contexts_used = True
        self.plain = False
