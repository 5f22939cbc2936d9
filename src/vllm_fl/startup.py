"""From vLLM's entry points to an active platform: detection, errors kept for later, the hand-over to child processes.

vLLM calls the platform's entry point in every process, twice when it wins, and swallows what it raises. So detection
keeps an error instead, and :func:`activate`, which runs where vLLM does not wrap, raises it before a model loads.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.hosting import handover
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings, register_layers

from .compat import detection, model_runner, versions
from .host import HOST

logger = get_logger(__name__)

PLATFORM = "vllm_fl.platform.PlatformFL"
DISPATCHING = "vllm_fl.platform.Dispatching"
PLATFORM_GROUP = "vllm.platform_plugins"
CONFIG_KEY = "fl_dispatch"
"""The key under which vLLM's ``additional_config``, which reaches every process, carries our settings and policy."""

_stored: Exception | None = None

register_layers(HOST.name, HOST.layers.names)


def detect() -> str | None:
    """The platform's class path, or ``None`` where vLLM's own platform should run. Never raises."""
    return _decide()


@cache
def _decide() -> str | None:
    global _stored
    try:
        detection.declare_variables()
        active, reason = _judge()
    except Exception as error:  # vLLM would swallow it: kept, and raised by activate()
        _stored = error
        active, reason = True, f"start-up will stop, because of {type(error).__name__}: {error}"
    level = logging.INFO if active or not _stepped_aside() else logging.WARNING
    logger.log(level, "vllm_fl is %s: %s", "active" if active else "not active", reason)
    if not active:
        return None
    if _stored is None and get_settings().native_platform:
        return detect_device().native_platforms.get(HOST.name, PLATFORM)
    return PLATFORM


def _stepped_aside() -> bool:
    """Whether the device, and not the user, keeps the plugin from running."""
    return HOST.name in detect_device().left_to_host


def _judge() -> tuple[bool, str]:
    """Whether to activate, and why."""
    device, settings = detect_device(), get_settings()
    if _stepped_aside():
        return False, f"device '{device.name}' is not served: {device.left_to_host[HOST.name]}"
    if not settings.policy.enabled:
        in_tree = detection.in_tree_platform()
        if in_tree is not None:
            return False, f"dispatch is switched off, and vLLM's own platform '{in_tree}' covers this machine"
        return True, f"dispatch is switched off, but no platform of vLLM's own covers device '{device.name}'"
    others = [entry.name for entry in entry_points(group=PLATFORM_GROUP) if not entry.value.startswith("vllm_fl:")]
    beside = f"; also installed, and only one may be active: {', '.join(others)}" if others else ""
    return True, f"device '{device.name}' ({device.device_name(0)}){beside}"


@cache
def warn_of_unverified_device() -> None:
    """One WARNING where nobody has verified this machine's device under vLLM."""
    if reason := detect_device().unverified(HOST.name):
        logger.warning("%s: compare tokens before you rely on it (docs/chips.md)", reason)


def raise_stored() -> None:
    """Raise what detection found wrong."""
    if _stored is not None:
        raise _stored.with_traceback(None)


def is_active() -> bool:
    """Whether vLLM runs on our platform in this process."""
    from vllm.platforms import current_platform

    return any(f"{base.__module__}.{base.__qualname__}" == DISPATCHING for base in type(current_platform).__mro__)


def register_ops() -> None:
    """vLLM's general entry point: does nothing unless the platform is ours, and says so if it should be."""
    wanted = _decide()
    raise_stored()
    if is_active():
        from . import layers
        from .compat import metrics, p2p, weight_transfer

        _prepare_host()
        metrics.join_metrics()
        weight_transfer.offer()
        p2p.offer()
        layers.register(get_settings())
    elif wanted is not None:
        from vllm.platforms import current_platform

        logger.warning(
            "vllm_fl is installed, but vLLM runs %s and no operator is dispatched; VLLM_TARGET_DEVICE=cpu and a "
            "VLLM_PLUGINS without 'fl' have that effect",
            type(current_platform).__name__,
        )


def _prepare_host() -> None:
    runners = detect_device().model_runners
    if "v2" not in runners or why_unserved():
        model_runner.do_without_triton(v2="v2" in runners)


def activate() -> None:
    """Start the core in this process, or raise what is wrong with its settings and plugins. Idempotent."""
    raise_stored()
    versions.warn_of_untested_host()
    _prepare_host()
    from .attention import register_backend

    manager = get_default_manager()
    register_backend(manager.registry)
    manager.ensure_initialized()


def adopt(additional_config: Any) -> None:
    """Take over the settings and the policy that the parent packed; equal ones change nothing."""
    if isinstance(additional_config, dict):
        handover.take_over(additional_config.get(CONFIG_KEY, {}))
