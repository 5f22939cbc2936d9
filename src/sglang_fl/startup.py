"""From SGLang's entry points to an active platform, and the settings of a parent process.

An error that is kept is raised where SGLang does not wrap: in the parent when it completes its server arguments
(:func:`activate`), in a scheduler process when it imports the model runner. Both are before a model loads.
"""

from __future__ import annotations

import os
from functools import cache

from fl_dispatch import ConfigError, get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting import handover
from fl_dispatch.hosting.startup import Startup
from fl_dispatch.policy import PolicyManager
from fl_dispatch.settings import Settings, register_layers, reset_settings

from . import own_branches
from .host import HOST

START = Startup("sglang_fl", HOST, "sglang.srt.platforms")
PLATFORM = "sglang_fl.platform.PlatformFL"
PREFIXES = ("SGLANG_FL_", "VLLM_FL_")
"""Under SGLang a variable of ours may begin with either; the first is read first."""

register_layers(HOST.name, HOST.layers.names)


@cache
def detect() -> str | None:
    """The platform's class path, or ``None`` where SGLang's own platform should run. Never raises."""
    try:
        reset_settings(prefixes=PREFIXES)
        PolicyManager.get_instance().reread_settings()  # a policy that was set in code stays
        handover.adopt()
        if not START.decide(_judge):
            return None
        own_branches.leave(detect_device())
    except Exception as error:  # SGLang would swallow it: kept, and raised by activate()
        START.keep(error)
        # Said at once, because SGLang may stop for a reason of its own before activate() runs.
        START.logger.error("start-up will stop, because of %s: %s", type(error).__name__, error)
    return PLATFORM


def _judge(settings: Settings) -> tuple[bool, str]:
    """That it runs, and why.

    Raises:
        ConfigError: a variable would have SGLang go around the operators.
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
    state = "" if settings.policy.enabled else "; dispatch is switched off, so operators run their references"
    return True, START.reason(state)


def register_hooks() -> None:
    """SGLang's general entry point: registers our hooks unless another platform runs. Never raises."""
    # After an error SGLang would log the same one again for hooks that it cannot apply.
    if detect() is None or START.error is not None:
        return
    try:
        from . import compat, hooks

        compat.warn_of_untested_host()
        hooks.register(compat.all_hooks())
        compat.extend_host()
    except Exception as error:
        START.keep(error)


def activate() -> None:
    """Start the core in this process, or raise what is wrong with settings, plugins and hooks. Idempotent."""
    START.raise_kept()
    from . import hooks

    hooks.refuse_unhooked()
    get_default_manager().ensure_initialized()
