"""One lock for every change (registrations, policies, bans, tables), and another for loading backends.

Forms of weights (:mod:`.weight_forms`) and the costs of shadow mode have one lock each; a thread that holds one of
these takes neither of the two above.

Readers take no lock, and a single lock for all writers leaves no lock order to get wrong. Backends load without the
writers' lock, because an import takes a lock of its own and its module may dispatch. One thread at a time loads them,
and no thread waits for it for ever. A fork waits for the active writer and loader, so that a child never sees a
half-done change or a half-imported module, and the child gets new locks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FORK_WAIT_SECONDS = 10.0  # for a thread that runs a backend's code; then the fork goes ahead, and the child starts anew


class ForkableLock:
    """A re-entrant lock that survives a fork, also one made while it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0
        self._at_fork = threading.local()  # two threads may fork at once
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self, seconds: float = -1) -> bool:
        """Take the lock within ``seconds`` (by default without a limit), and return whether that succeeded."""
        taken = self._lock.acquire(timeout=seconds)
        if taken:
            self._owner = threading.get_ident()
            self._depth += 1
        return taken

    def release(self) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    @contextmanager
    def within(self, seconds: float) -> Iterator[bool]:
        """Hold the lock in a block; after ``seconds`` of waiting, yield ``False`` and run the block without it."""
        if not self.acquire(seconds):
            yield False
            return
        try:
            yield True
        finally:
            self.release()

    @property
    def mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    def _before(self) -> None:
        self._at_fork.held = self._lock.acquire(timeout=FORK_WAIT_SECONDS)

    def _in_parent(self) -> None:
        if self._at_fork.held:
            self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.RLock()
        if not self.mine:  # another thread of the parent held the lock, and does not exist in this child
            self._owner = self._depth = 0
        for _ in range(self._depth):
            self._lock.acquire()


writers = ForkableLock()
loading = ForkableLock()
"""The lock for loading backends. A thread that needs both locks takes this one first, and so does a fork."""
