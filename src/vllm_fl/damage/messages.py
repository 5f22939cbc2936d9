"""What scheduler and workers tell each other, on the objects that vLLM sends between them in every step."""

from __future__ import annotations

from typing import Any

from fl_dispatch.hosting.damage.verdicts import Told
from fl_dispatch.hosting.layers.attribute import Attached

WATCH = Attached[bool]("fl_watch")
"""The mark of a ``SchedulerOutput`` with a step that runs eagerly, while each call is looked at."""
TOLD = Attached[Told]("fl_told")
"""The message on a ``ModelRunnerOutput``."""


def attach(output: Any, told: Told) -> None:
    """Give a runner's output what the worker tells; it may be one that is still being copied from the device."""
    for name in ("model_runner_output", "_model_runner_output"):  # of the V2 runner's, of the V1 runner's
        output = getattr(output, name, output)
    TOLD.give(output, told)
