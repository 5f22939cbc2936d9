"""The plugin's schedulers, which give a batch room for several steps of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULERS = {
    False: "vllm_fl.several_steps.scheduler.StepsScheduler",
    True: "vllm_fl.several_steps.scheduler.AsyncStepsScheduler",
}
"""Whether scheduling is asynchronous → the scheduler."""


def makes_several_steps(config: VllmConfig) -> bool:
    """Whether the engine makes several steps per scheduler call."""
    return config.scheduler_config.scheduler_cls in SCHEDULERS.values()
