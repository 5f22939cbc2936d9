"""Report of a serving process's implementations, as plain data that a host can send between processes."""

from __future__ import annotations

import os
from operator import is_not
from typing import Any

from ...fixed_choices import data
from ...manager import OpManager, get_default_manager
from ...settings import ITEMS, get_settings
from ...shadow.sampling import Sampling
from ..ranks import collectives
from ..start import aten, handover

Choices = dict[str, Any]
"""The changeable part of a process's record, as plain data."""


def dispatch_report() -> dict[str, Any]:
    """Return the dispatch core's part of a worker's report.

    ``settings`` is their JSON with the policy in force, and the origin of each value. ``counts`` is ``"operator
    implementation"`` → calls; ``decisions`` is operator → the output of ``fl explain --json``; ``failed`` is operator →
    ids. ``communication`` is group → collective → calls; ``manifest`` is the frozen choice, or ``None``; ``aten`` is
    backend → PyTorch's operators that it replaces, see :class:`~fl_dispatch.aten_replacement.ReplacementReport`.
    """
    manager = get_default_manager()
    manifest = manager.freezer.manifest
    return {
        "pid": os.getpid(),
        **handover.pack(),
        "counts": {" ".join(key): calls for key, calls in sorted(manager.call_counts().items()) if calls},
        "decisions": {op: manager.explain(op).as_data() for op in manager.registry.list_operators()},
        "failed": {op: sorted(ids) for op, ids in manager.get_failed_impls().items()},
        "communication": collectives.report(),
        "manifest": None if manifest is None else manifest.as_data(),
        "aten": aten.report(),
    }


class RunReport:
    """The changeable part of this process's record, rebuilt only after a change.

    The thread that builds it shares Python's lock with the serving thread. A report of hundreds of layers takes tens of
    milliseconds (``benchmarks/binding_cost.py``), and meanwhile each kernel launch may wait for the lock.
    """

    def __init__(self) -> None:
        self._made_of: tuple[object, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._choices: Choices = {}

    def choices(self) -> Choices:
        """Return the result of :func:`run_choices`, and counted events.

        ``shadow`` has the work and findings of shadow mode, or is ``None``; ``damage`` lists operator, implementation
        and layer of each origin of NaN or infinity, with its count.
        """
        manager = get_default_manager()
        state, root, shadow = manager.state, manager.table_keeper.root, manager.shadow
        # A change to a report replaces these objects, and does not modify them; a dictionary may grow.
        answers = state.availability.answers
        made_of: tuple[object, ...] = (manager, get_settings(), root.plans, root.stale, manager.freezer.manifest)
        made_of += (root.current, state.failures.failures(), answers, state.facts, shadow.findings.banned)
        sizes = len(root.plans), len(answers), len(state.traces.untraceable())
        if sizes != self._sizes or any(map(is_not, made_of, self._made_of)):
            self._choices = run_choices(manager)
            self._made_of, self._sizes = made_of, sizes
        origins = [[*origin, times] for origin, times in shadow.findings.origins.items()]
        found = None if shadow.sampling is None else _shadow(manager, shadow.sampling)
        return {**self._choices, "shadow": found, "damage": origins}


def run_choices(manager: OpManager) -> Choices:
    """Return the choices of this process and the events since its start.

    ``settings`` is setting → value and origin; ``decisions`` is operator → the output of ``fl explain --json``.
    ``used`` are the operators with a bound layer, or with an implementation that has run. ``layers`` is
    ``operator@layer`` → the decision, for layers with another choice. ``failed`` are the bans, each with ``fallbacks``,
    the number of failed calls that another implementation took over.
    """
    settings, state, manifest = get_settings(), manager.state, manager.freezer.manifest
    return {
        "settings": {item.field: [str(settings.value(item.field)), str(settings.origin(item.field))] for item in ITEMS},
        "decisions": {op: manager.explain(op).as_data() for op in manager.registry.list_operators()},
        "used": sorted(_used(manager)),
        "layers": _layers_apart(manager),
        "manifest": None if manifest is None else manifest.as_data(),
        "failed": [
            {
                "operator": op_name,
                "implementation": impl_id,
                "kind": str(kind),
                "cause": failure.cause,
                "fallbacks": 0 if (op_name, impl_id, kind) in manager.shadow.findings.banned else failure.count,
            }
            for (op_name, impl_id), kinds in state.failures.failures().items()
            for kind, failure in kinds.items()
        ],
    }


def _used(manager: OpManager) -> set[str]:
    bound = {plan.op_name for plan in dict(manager.table_keeper.root.plans).values() if plan.scope is not None}
    return bound | manager.state.proofs.operators()


def _layers_apart(manager: OpManager) -> dict[str, Any]:
    """Return the layers with other choices than their operator, with these choices."""
    plans, apart = dict(manager.table_keeper.root.plans), {}
    for key, plan in plans.items():
        common = plans.get(plan.op_name)
        if plan.scope is None or common is None or plan.decision is common.decision:
            continue
        choices = [data(manager.state.choices(each.decision)) for each in (plan, common)]
        if choices[0] != choices[1]:
            apart[key] = {**plan.decision.as_data(), "runs": choices[0]}
    return apart


def _shadow(manager: OpManager, sampling: Sampling) -> dict[str, Any]:
    """Return the state of shadow mode as plain data."""
    options, findings = sampling.options, manager.shadow.findings
    return {
        "share": options.share,
        "second": options.second,
        "action": "ban" if options.ban else "log",
        "budget": options.budget,
        "compared": {" ".join(pair): calls for pair, calls in sorted(findings.compared_calls().items())},
        "passed_over": sampling.passed_over,
        "share_of_time": round(sampling.share_of_time(), 6),
        "not_compared": dict(findings.unfit),
        "findings": [found.as_data() for found in findings.found()],
    }
