"""Freezing: fix the choice of implementations from here on, and list it in the manifest.

Hosts that drop the guards of compiled code, or replay captured graphs, would go on with an old choice after a change.
So they freeze dispatch before they compile. From then on a change that would alter a choice is an error, and so is a
failure, because no other implementation may take over. A change that alters no choice passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..locking import writers
from ..logger_manager import get_logger
from ..ops import OPERATORS
from ..run.keeper import TableKeeper
from ..run.traced import untried
from ..run.trial import obstacle
from ..state import State
from .manifest import Manifest, manifest_of

logger = get_logger(__name__)
_frozen: tuple[weakref.ref[State], ...] = ()  # writers replace it as a whole


def frozen_states() -> Iterator[State]:
    """Return the states of the managers that are frozen."""
    for reference in _frozen:
        state = reference()
        if state is not None:
            yield state


class Freezer:
    """Freezes the choices of one manager.

    Attributes:
        manifest: the frozen choices; ``None`` while dispatch is not frozen.
    """

    def __init__(self, state: State, tables: TableKeeper) -> None:
        self._state, self._tables = state, tables
        self.manifest: Manifest | None = None

    def freeze(self, compiling: bool = True) -> Manifest:
        """Fix the current choices of the global policy for every operator and bound layer. Idempotent.

        If code will be compiled, trials first find what Dynamo can trace, so that the manifest lists it.

        A policy context with other choices that is open in any thread runs the fixed choices from now on.
        """
        global _frozen
        state = self._state
        if compiling and self.manifest is None:
            self._try_traces()
        with writers:
            if self.manifest is not None:
                return self.manifest
            decided = {(plan.op_name, plan.scope): plan.decision for plan in self._tables.root.plans.values()}
            choices = {place: state.choices(decision) for place, decision in decided.items()}
            state.fixed.fix(choices)
            self.manifest = manifest_of(decided, choices, state.traces.obstacle, state.whole)
            _frozen = (*(weakref.ref(other) for other in frozen_states()), weakref.ref(state))
            state.changed(None)
        logger.info("Dispatch is frozen: manifest %s, %d operators", self.manifest.hash, len(self.manifest.choices))
        return self.manifest

    def add_tactics(self, tactics: Mapping[str, Mapping[str, str]]) -> None:
        """Add the choices of kernels' autotuners to the manifest; do nothing while dispatch is not frozen."""
        with writers:
            if self.manifest is not None:
                self.manifest = replace(self.manifest, tactics=tactics)

    def _try_traces(self) -> None:
        """Try whether Dynamo can trace the implementations that may run; those that it cannot trace run as views."""
        state, found = self._state, 0
        for plan in list(self._tables.root.plans.values()):
            runs = [impl for branch in plan.decision.branches for impl in state.reachable(plan.decision, branch)]
            for impl in untried(state, runs, OPERATORS.get(plan.op_name)):
                found += bool(obstacle(state, impl))
        if found:
            state.changed(None)  # operators that are bound from now on are their views

    def thaw(self) -> None:
        """Allow changes again."""
        global _frozen
        with writers:
            if self.manifest is None:
                return
            _frozen = tuple(weakref.ref(other) for other in frozen_states() if other is not self._state)
            self.manifest = None
            self._state.fixed.fix(None)
            self._state.changed(None)
        logger.info("Dispatch is thawed")
