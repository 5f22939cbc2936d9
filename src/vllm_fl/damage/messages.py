"""Messages between scheduler and workers, on the objects that vLLM sends between them in every step."""

from __future__ import annotations

from typing import Any

from fl_dispatch.hosting.damage.verdicts import Told
from fl_dispatch.hosting.layers.attribute import Attached

WATCH = Attached[bool]("fl_watch")
"""The mark of a ``SchedulerOutput`` for a step that runs eagerly with each call checked."""
TOLD = Attached[Told]("fl_told")
"""The message on a ``ModelRunnerOutput``."""


def attach(output: Any, told: Told) -> None:
    """Attach a worker's report to a runner's output, which may still be being copied from the device."""
    for name in ("model_runner_output", "_model_runner_output"):  # of the V2 runner's, of the V1 runner's
        output = getattr(output, name, output)
    TOLD.give(output, told)
