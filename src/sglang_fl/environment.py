"""Environment variables that are refused for every model. Importing this module imports nothing of SGLang.

``fl doctor`` calls :func:`check`, too.
"""

from __future__ import annotations

import os

from fl_dispatch import ConfigError
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.hosting.ranks import collectives
from fl_dispatch.settings import get_settings

PREFIXES = ("SGLANG_FL_", "VLLM_FL_")
"""Prefixes of our variables under SGLang; the first is read first."""


def check(device: DeviceSpec) -> None:
    """Refuse variables with which no engine can start.

    Raises:
        ConfigError: the first variable that is wrong.
    """
    get_settings()
    refuse_ways_around()
    collectives.refuse_missing_library(device.torch_type)


def without_effect(device: DeviceSpec) -> list[str]:
    """Return settings without effect under this host, each as a sentence."""
    settings = get_settings()
    reasons = {"native_platform": "it has no such platform", "page_out": "weights move to a disk under vLLM only"}
    return [
        f"{settings.origin(name)}: has no effect under SGLang, because {reason}"
        for name, reason in reasons.items()
        if getattr(settings, name)
    ]


def refuse_ways_around() -> None:
    """Refuse SGLang's own variables that would bypass the operators.

    Raises:
        ConfigError: one is set.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise ConfigError(
            "environment variable SGLANG_USE_CPU_ENGINE", None, "selects SGLang's compiled CPU kernels, which "
            "sglang_fl does without; unset it, or leave sglang_fl out with SGLANG_PLUGINS"
        )  # fmt: skip
    if (forced := os.environ.get("SGLANG_FORCE_FUSED_OP_BACKEND")) is not None:
        raise ConfigError(
            "environment variable SGLANG_FORCE_FUSED_OP_BACKEND", None, f"'{forced}' would run SGLang's own code in "
            "the place of the operators that sglang_fl chooses; unset it, and choose with SGLANG_FL_PREFER or "
            "SGLANG_FL_PER_OP"
        )  # fmt: skip
