"""A manager's start: backends are imported, registered and checked once, by whichever call comes first."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from . import builtin_ops, checks, discovery
from .global_policy import GLOBAL
from .knowledge.sampling import Sampling, Wish
from .locking import writers
from .logger_manager import get_logger
from .run.keeper import TableKeeper
from .settings import get_settings
from .state import State

logger = get_logger(__name__)


class Start:
    """Whether one manager has started, and how it does.

    Args:
        state: the manager's knowledge, whose registry gets the backends.
        tables: its tables, which are settled once it has started.
        backends: whether there are backends to register; else the registry is complete as it is.
    """

    def __init__(self, state: State, tables: TableKeeper, backends: bool) -> None:
        self._state, self._tables = state, tables
        self._done = not backends
        self._registering = False
        self._importing: set[int] = set()

    def run(self) -> None:
        """Register the backends unless that is done, and build the tables.

        Modules are imported before the writers' lock is taken, because an import takes a lock of its own. A module that
        dispatches while it is imported, and a backend that does while it registers, get what is there so far; then the
        next call tries again.
        """
        thread, found = threading.get_ident(), None
        if not self._done and thread not in self._importing and not (self._registering and writers.mine):
            self._importing.add(thread)
            try:
                found = [discovery.imported(each) for each in (*builtin_ops.backends(), *discovery.plugins())]
            finally:
                self._importing.discard(thread)
        with writers:
            if self._tables.root.settled and self._done:
                return  # another thread did
            if found and not self._done and not self._registering:
                self._registering = True
                try:
                    self._register(target for target in found if target is not None)
                finally:
                    self._registering = False
                self._done = None not in found
            self._state.changed(None)
            if not (self._done or self._registering):
                self._tables.root.unsettle()

    def after_fork_in_child(self) -> None:
        """Forget what other threads of the parent were doing: they do not exist here."""
        if not writers.mine:
            self._registering = False
        self._importing &= {threading.get_ident()}

    def _register(self, targets: Iterable[discovery.Target]) -> None:
        settings = get_settings()
        for target in targets:
            discovery.load_backend(self._state.registry, *target)
        policy = GLOBAL.get()
        checks.check(self._state, policy)
        if wish := Wish.of(settings):
            self._state.sampling = Sampling(wish)
        if settings.dispatch_debug:
            self._state.counter.on = True
            for op_name in self._state.registry.list_operators():
                logger.info("%s", self._state.decide(op_name, None, policy))
