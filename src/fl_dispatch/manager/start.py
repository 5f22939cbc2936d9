"""A manager's start: the first call imports, registers and checks the backends, once."""

from __future__ import annotations

import threading

from .. import builtin_ops, discovery
from ..global_policy import GLOBAL
from ..importing import is_importing
from ..locking import loading, writers
from ..logger_manager import get_logger
from ..run.keeper import TableKeeper
from ..settings import get_settings
from ..shadow.mode import Shadow
from ..shadow.sampling import Sampling, SamplingOptions
from ..state import State
from . import checks

logger = get_logger(__name__)

WAIT_SECONDS = 30.0
"""Seconds to wait for another thread that loads the backends; then a call goes ahead without the missing ones."""


class Start:
    """The start of one manager.

    Args:
        state: the manager's knowledge; its registry gets the backends.
        tables: its tables, which are stale until it has started.
        shadow: its shadow mode, which the settings may switch on.
        backends: whether there are backends to register; otherwise the registry is already complete.
    """

    def __init__(self, state: State, tables: TableKeeper, shadow: Shadow, backends: bool) -> None:
        self._state, self._tables, self._shadow = state, tables, shadow
        self._done = not backends
        self._at_work: set[int] = set()

    def run(self) -> None:
        """Load the backends unless they are loaded, and build the tables.

        The loading thread runs the backends' code: imports, registration, availability checks. If that code dispatches,
        it gets the implementations registered so far, and the next call tries again. Other threads wait for the loading
        one, except threads that it may be waiting for: they load the backends too, and the first registration stays.
        """
        thread, complete = threading.get_ident(), self._done
        if not complete and thread not in self._at_work:
            awaited = writers.mine or is_importing()  # perhaps by the thread that is loading
            with loading.within(0 if awaited else WAIT_SECONDS) as alone:
                if alone or awaited:
                    self._at_work.add(thread)
                    try:
                        complete = self._done or self._load()
                    finally:
                        self._at_work.discard(thread)
                else:
                    logger.warning("A backend has been loading for %.0f s; a call does without it", WAIT_SECONDS)
        with writers:
            if not self._tables.root.stale and self._done:
                return  # another thread loaded them
            self._done = self._done or complete
            self._state.changed(None)
            if not self._done:
                self._tables.root.mark_stale()

    def after_fork_in_child(self) -> None:
        """Reset what other threads of the parent were doing, because they do not exist in this child."""
        self._at_work &= {threading.get_ident()}

    def _load(self) -> bool:
        """Register all backends and check availability; return whether no backend has to wait for a module."""
        state = self._state
        found = [discovery.imported(each) for each in (*builtin_ops.backends(), *discovery.plugins())]
        loaded = [discovery.load_backend(state.registry, target) for target in found if target is not None]
        policy = GLOBAL.get()
        decisions = [state.decide(op_name, None, policy) for op_name in state.registry.list_operators()]
        checks.check(state, policy)
        settings = get_settings()
        if (options := SamplingOptions.of(settings)) and self._shadow.sampling is None:
            self._shadow.sampling = Sampling(options)
        if settings.dispatch_debug:
            state.counter.on = True
            for decision in decisions:
                logger.info("%s", decision)
        return None not in (*found, *loaded) and not state.availability.unanswered
