"""From SGLang's entry points to an active platform, and the settings of a parent process.

A kept error is raised where SGLang does not catch it: in the parent when it completes its server arguments
(:func:`activate`), in a scheduler process when it imports the model runner. Both are before a model loads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.start import handover
from fl_dispatch.hosting.start.startup import Startup
from fl_dispatch.policy import PolicyManager
from fl_dispatch.settings import Settings, get_settings, reset_settings

from .. import environment
from ..compat import device_branches
from ..host import HOST

COMMANDS = ("sglang.cli.main", "sglang.launch_server")
START = Startup("sglang_fl", HOST, "sglang.srt.platforms", "SGLANG_PLATFORM=fl", COMMANDS)
PLATFORM = "sglang_fl.platform.out_of_tree.PlatformFL"


@cache
def detect() -> str | None:
    """Return the platform's class path, or ``None`` if SGLang's own platform should run. Never raises."""
    try:
        with START.reading():
            reset_settings(prefixes=environment.PREFIXES)
            PolicyManager.get_instance().reread_settings()  # a policy that was set in code stays
            handover.adopt()
            get_settings()
        if not START.decide(_judge):
            return None
        device_branches.leave(detect_device())
    except Exception as error:  # SGLang would swallow it, so it is kept, and raised by activate()
        START.keep(error)
        # Logged at once, because SGLang may stop for another reason before activate() runs.
        START.logger.error("start-up will stop, because of %s: %s", type(error).__name__, error)
    return PLATFORM


def _judge(settings: Settings) -> tuple[bool, str]:
    """Return that the plugin runs, and why.

    Raises:
        ConfigError: a variable would make SGLang bypass the operators.
    """
    environment.refuse_ways_around()
    state = "" if settings.policy.enabled else "; dispatch is switched off, so operators run their references"
    return True, START.reason(state)


def run_if_active(step: Callable[[], None]) -> None:
    """Run a step of the start unless another platform runs, and keep its error. Never raises."""
    # After an error SGLang would log the same error again for hooks that it cannot apply.
    if detect() is None or START.error is not None:
        return
    try:
        step()
    except Exception as error:
        START.keep(error)


def activate() -> None:
    """Start the core in this process, or raise the error in settings, plugins or hooks. Idempotent."""
    START.raise_kept()
    environment.check(detect_device())
    from ..compat import hooks

    hooks.refuse_unhooked()
    get_default_manager().ensure_initialized()
