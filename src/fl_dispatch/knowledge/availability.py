"""Which implementations can run on this machine, each asked once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..locking import writers
from ..types import OpImpl

Answer = tuple[bool, str]


class Availability:
    """The answers of availability checks. Owned by one manager.

    A check runs under the writers' lock, so that nobody builds a table from half an answer; a check that dispatches
    itself finds its own implementation unavailable meanwhile.
    """

    def __init__(self) -> None:
        self._answers: dict[OpImpl, Answer] = {}
        self._asking: set[OpImpl] = set()

    def of(self, impl: OpImpl) -> Answer:
        """Whether an implementation can run here, and a message why not."""
        answer = self._answers.get(impl)
        if answer is not None:
            return answer
        with writers:
            if impl in self._asking:
                return False, "its availability is being asked"
            if impl not in self._answers:
                self._asking.add(impl)
                try:
                    self._answers[impl] = impl.availability()
                finally:
                    self._asking.discard(impl)
            return self._answers[impl]

    @contextmanager
    def asked_again(self) -> Iterator[None]:
        """Ask everybody again; the old answers come back if the block raises."""
        with writers:
            before, self._answers = self._answers, {}
            try:
                yield
            except BaseException:
                self._answers = before
                raise

    def forget_who_asks(self) -> None:
        """In a forked child: the thread that was asking does not exist here."""
        self._asking.clear()
