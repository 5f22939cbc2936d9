"""The choice whether damaged requests are found in an engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

COUNTS = "VLLM_COMPUTE_NANS_IN_LOGITS"
"""vLLM's variable that has its runners count; the processes of an engine inherit it."""
OURS = "FL_DAMAGE_COUNTS"
"""The variable that is there if we set vLLM's, and not the user."""


def adapt(vllm_config: VllmConfig) -> None:
    """Have vLLM's runners count damaged logits, unless the user decided that."""
    if vllm_config.model_config is None or (COUNTS in os.environ and OURS not in os.environ):
        return
    if is_off() or vllm_config.model_config.runner_type != "generate":
        why = ""
    elif why := why_not(vllm_config):
        logger.warning("requests with NaN or infinity are not found, because %s", why)
    else:
        os.environ.update({COUNTS: "1", OURS: "1"})
        return
    for name in (COUNTS, OURS):
        os.environ.pop(name, None)


def is_off() -> bool:
    """Whether the user wants damaged requests to be ignored, or nothing to be dispatched."""
    settings = get_settings()
    return settings.damaged_requests == "ignore" or not settings.policy.enabled


def why_not(vllm_config: VllmConfig) -> str:
    """Why vLLM's counts say nothing about single requests; empty if they do."""
    if vllm_config.speculative_config is not None:
        return "with drafts vLLM counts by token, and not by request"
    return ""
