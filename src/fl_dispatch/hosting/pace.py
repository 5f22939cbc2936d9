"""The time of a step, from which hosts choose the number of steps per scheduler call."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """The time of a step, estimated from the time between two scheduler calls.

    Args:
        most: seconds that the steps of one call may take; ``None`` if the number must not depend on time.
        clock: returns seconds.
    """

    def __init__(self, most: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self.step: float | None = None
        self.begun, self.steps = 0.0, 0

    def fitting(self, steps: int) -> int:
        """Return the number of steps that fit the time: at least one, and one before a step was timed."""
        if self.most is None:
            return steps
        return 1 if self.step is None else max(1, min(steps, int(self.most / self.step)))

    def begin(self, steps: int) -> None:
        """Record that ``steps`` begin; 0 for a call that also reads prompts, and is not timed."""
        now = self.clock()
        if steps and self.steps:
            seen = (now - self.begun) / self.steps
            self.step = seen if self.step is None else self.step + (min(seen, 4 * self.step) - self.step) / 4
        self.begun, self.steps = now, steps
