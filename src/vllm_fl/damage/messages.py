"""Messages between scheduler and workers, on the objects that vLLM sends between them in every step."""

from __future__ import annotations

from typing import Any

from fl_dispatch.hosting.damage.verdicts import StepReport
from fl_dispatch.hosting.layers.attribute import Attached

WATCH = Attached[bool]("fl_watch")
"""The mark of a ``SchedulerOutput`` for a step that runs eagerly with each call checked."""
STEP_REPORT = Attached[StepReport]("fl_step_report")
"""The message on a ``ModelRunnerOutput``."""


def attach(output: Any, report: StepReport) -> None:
    """Attach a worker's report to a runner's output, which may still be being copied from the device."""
    for name in ("model_runner_output", "_model_runner_output"):  # of the V2 runner's, of the V1 runner's
        output = getattr(output, name, output)
    STEP_REPORT.give(output, report)
