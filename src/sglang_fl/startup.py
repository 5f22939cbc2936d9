"""From SGLang's entry points to an active platform: detection, errors kept for later, the hand-over to child processes.

SGLang calls both entry points in every process and swallows what they raise. So an error is kept, and raised by
:func:`activate`, which runs where SGLang does not wrap: in the parent when it completes its server arguments, in a
scheduler process when it imports the model runner. Both are before a model loads.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.metadata import entry_points

from fl_dispatch import ConfigError, get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting import handover
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.policy import PolicyManager
from fl_dispatch.settings import get_settings, register_layers, reset_settings

from . import own_branches
from .host import HOST

logger = get_logger(__name__)

PLATFORM = "sglang_fl.platform.PlatformFL"
PLATFORM_GROUP = "sglang.srt.platforms"
PREFIXES = ("SGLANG_FL_", "VLLM_FL_")
"""Under SGLang a variable of ours may begin with either; the first is read first."""

_stored: Exception | None = None

register_layers(HOST.name, HOST.layers.names)


def _keep(error: Exception) -> None:
    global _stored
    if _stored is None:
        _stored = error


def raise_stored() -> None:
    """Raise what an entry point found wrong."""
    if _stored is not None:
        raise _stored.with_traceback(None)


@cache
def detect() -> str | None:
    """The platform's class path, or ``None`` where SGLang's own platform should run. Never raises."""
    try:
        reset_settings(prefixes=PREFIXES)
        PolicyManager.get_instance().reread_settings()  # a policy that was set in code stays
        handover.adopt()
        active, reason = _judge()
        if active:
            own_branches.leave(detect_device())
    except Exception as error:  # SGLang would swallow it: kept, and raised by activate()
        _keep(error)
        # Said at once, because SGLang may stop for a reason of its own before activate() runs.
        logger.error("start-up will stop, because of %s: %s", type(error).__name__, error)
        return PLATFORM
    level = logging.INFO if active or not _stepped_aside() else logging.WARNING
    logger.log(level, "sglang_fl is %s: %s", "active" if active else "not active", reason)
    return PLATFORM if active else None


def _stepped_aside() -> bool:
    """Whether the device, and not the user, keeps the plugin from running."""
    return HOST.name in detect_device().left_to_host


@cache
def warn_of_unverified_device() -> None:
    """One WARNING where nobody has verified this machine's device under SGLang."""
    if reason := detect_device().unverified(HOST.name):
        logger.warning("%s: compare tokens before you rely on it (docs/chips.md)", reason)


def _judge() -> tuple[bool, str]:
    """Whether to activate, and why."""
    device, settings = detect_device(), get_settings()
    if _stepped_aside():
        return False, f"device '{device.name}' is not served: {device.left_to_host[HOST.name]}"
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
    others = [entry.name for entry in entry_points(group=PLATFORM_GROUP) if not entry.value.startswith("sglang_fl:")]
    beside = f"; also installed, and only one may be active: {', '.join(others)}" if others else ""
    state = "" if settings.policy.enabled else "; dispatch is switched off, so operators run their references"
    return True, f"device '{device.name}' ({device.device_name(0)}){state}{beside}"


def register_hooks() -> None:
    """SGLang's general entry point: registers our hooks unless another platform runs. Never raises."""
    if detect() is None or _stored is not None:  # SGLang would log the same error again for hooks it cannot apply
        return
    try:
        from . import compat, hooks

        compat.warn_of_untested_host()
        hooks.register(compat.all_hooks())
        compat.extend_host()
    except Exception as error:
        _keep(error)


def activate() -> None:
    """Start the core in this process, or raise what is wrong with settings, plugins and hooks. Idempotent."""
    raise_stored()
    from . import hooks

    hooks.refuse_unhooked()
    get_default_manager().ensure_initialized()
