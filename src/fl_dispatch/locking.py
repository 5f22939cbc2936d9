"""One lock for everybody who changes something: registrations, policies, bans, tables, a manager's start.

Readers take no lock. With a single lock for all writers there is no order to get wrong. A fork waits for the writer at
work, so that a child never sees a half-done change, and gets a lock of its own.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

FORK_WAIT_SECONDS = (
    10.0  # for a writer that imports a backend; then the fork goes ahead, and the child rebuilds its tables
)


class WriterLock:
    """A re-entrant lock that survives a fork, also one made while it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0
        self._at_fork = threading.local()  # two threads may fork at once
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    @property
    def mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def _before(self) -> None:
        self._at_fork.held = self._lock.acquire(timeout=FORK_WAIT_SECONDS)

    def _in_parent(self) -> None:
        if self._at_fork.held:
            self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.RLock()
        if not self.mine:  # another thread of the parent was writing: it does not exist here
            self._owner = self._depth = 0
        for _ in range(self._depth):
            self._lock.acquire()


writers = WriterLock()
