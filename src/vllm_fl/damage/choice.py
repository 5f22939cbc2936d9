"""Decide whether an engine looks for damaged requests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fl_dispatch.settings import get_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTS = "VLLM_COMPUTE_NANS_IN_LOGITS"
"""vLLM's variable that makes its runners count; the processes of an engine inherit it."""
OURS = "FL_DAMAGE_COUNTS"
"""The variable that marks vLLM's variable as set by us, not by the user."""


def adapt(vllm_config: VllmConfig) -> None:
    """Make vLLM's runners count damaged logits, unless the user decided that.

    A draft model has its own configuration, made after its engine's.
    """
    model = vllm_config.model_config
    if model is None or model.runner_type == "draft" or (COUNTS in os.environ and OURS not in os.environ):
        return
    if is_off() or model.runner_type != "generate":
        for name in (COUNTS, OURS):
            os.environ.pop(name, None)
    else:
        os.environ.update({COUNTS: "1", OURS: "1"})


def is_off() -> bool:
    """Whether the user wants damaged requests to be ignored, or dispatch is off."""
    settings = get_settings()
    return settings.damaged_requests == "ignore" or not settings.policy.enabled
