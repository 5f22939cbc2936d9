"""From vLLM's entry points to an active platform, and the hand-over to child processes.

vLLM calls the platform's entry point twice if our platform wins. :func:`activate`, which vLLM does not wrap, raises
errors kept by detection before a model loads.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.hosting.facts import untested
from fl_dispatch.hosting.start import handover
from fl_dispatch.hosting.start.startup import Startup
from fl_dispatch.settings import Settings, get_settings

from ..compat import detection, model_runner, threads, versions
from ..host import HOST

COMMANDS = ("vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server")
START = Startup("vllm_fl", HOST, "vllm.platform_plugins", "VLLM_PLUGINS=fl", COMMANDS)
PLATFORM = "vllm_fl.platform.out_of_tree.PlatformFL"
DISPATCHING = "vllm_fl.platform.out_of_tree.Dispatching"
ENGINE = "vllm.v1.engine.core"
"""The module of a process that schedules."""
CONFIG_KEY = "fl_dispatch"
"""The key of our settings and policy in vLLM's ``additional_config``, which reaches every process."""


@cache
def detect() -> str | None:
    """Return the platform's class path, or ``None`` if vLLM's own platform should run. Never raises."""
    try:
        detection.declare_variables()
        with START.reading():
            get_settings()
        if not START.decide(_judge):
            return None
        if get_settings().native_platform:
            return detect_device().native_platforms.get(HOST.name, PLATFORM)
    except Exception as error:  # vLLM would swallow it, so it is kept, and raised by activate()
        START.keep(error)
        START.logger.info("vllm_fl is active: start-up will stop, because of %s: %s", type(error).__name__, error)
    return PLATFORM


def _judge(settings: Settings) -> tuple[bool, str]:
    """Whether to activate, and why."""
    if settings.policy.enabled:
        return True, START.reason()
    in_tree = detection.in_tree_platform()
    if in_tree is not None:
        return False, f"dispatch is switched off, and vLLM's own platform '{in_tree}' covers this machine"
    return True, f"dispatch is switched off, but no platform of vLLM's own covers device '{detect_device().name}'"


def is_active() -> bool:
    """Whether vLLM runs on our platform in this process."""
    from vllm.platforms import current_platform

    return any(f"{base.__module__}.{base.__qualname__}" == DISPATCHING for base in type(current_platform).__mro__)


def register_ops() -> None:
    """Run vLLM's general entry point: do nothing unless the platform is ours, and log it if it should be."""
    wanted = detect()
    START.raise_kept()
    if is_active():
        from ..compat import ending, metrics
        from ..damage import answers
        from ..damage.scheduler import contain
        from ..extensions import extensions
        from ..layers import classes
        from ..several_steps import choice as several_steps

        _prepare_host()
        metrics.join_metrics()
        ending.end_requests()
        answers.explain()
        if ENGINE in sys.modules:
            contain()  # in a process that did not make the engine's configuration
            several_steps.take_schedulers()
        for extension in extensions():
            extension.offer()
        classes.register(get_settings())
    elif wanted is not None:
        from vllm.platforms import current_platform

        START.logger.warning(
            "vllm_fl is installed, but vLLM runs %s and no operator is dispatched; VLLM_TARGET_DEVICE=cpu and a "
            "VLLM_PLUGINS without 'fl' have that effect",
            type(current_platform).__name__,
        )


@cache
def warn_of_untested_host() -> None:
    """Log one WARNING for a vLLM version that not all tests ran on, with the missing names that we rely on."""
    untested.warn_if_untested(HOST, versions.host_version(), versions.TESTED_HOSTS, "torch")


def _prepare_host() -> None:
    """Prepare vLLM for this device before its engine starts."""
    warn_of_untested_host()  # before anything that such a version may lack
    runners = detect_device().model_runners
    if "v2" not in runners or why_unserved():
        model_runner.do_without_triton(v2="v2" in runners)
    if not detect_device().accelerator:
        from vllm.v1.executor import multiproc_executor

        threads.leave(multiproc_executor)


def activate() -> None:
    """Start the core in this process, or raise the error in its settings or plugins. Idempotent."""
    START.raise_kept()
    _prepare_host()
    from ..attention.dense import register_backend

    manager = get_default_manager()
    register_backend(manager.registry)
    manager.ensure_initialized()


def adopt(additional_config: Any) -> None:
    """Install the settings and the policy that the parent packed; equal ones change nothing."""
    if isinstance(additional_config, dict):
        handover.take_over(additional_config.get(CONFIG_KEY, {}))
