"""Environment variables that are refused for every model. Importing this module imports nothing of vLLM.

``fl doctor`` calls :func:`check`, too.
"""

from __future__ import annotations

import os

from fl_dispatch import ConfigError
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.hosting.ranks import collectives
from fl_dispatch.settings import get_settings

from . import cores
from .host import HOST

CACHE = "VLLM_CPU_KVCACHE_SPACE"
PREFIXES = ("VLLM_FL_",)


def check(device: DeviceSpec) -> None:
    """Refuse variables with which no engine can start.

    Raises:
        ConfigError: the first variable that is wrong.
    """
    get_settings()
    cache_space()
    collectives.refuse_missing_library(device.torch_type)
    if not device.accelerator:
        cores.check(os.environ)


def without_effect(device: DeviceSpec) -> list[str]:
    """Return settings without effect on this device, each as a sentence."""
    settings, found = get_settings(), []
    if settings.native_platform and HOST.name not in device.native_platforms:
        reason = f"vLLM has no platform of its own for {device.name} that we extend"
        found.append(f"{settings.origin('native_platform')}: has no effect, because {reason}")
    if settings.page_out is not None and device.accelerator:
        reason = f"products on {device.name} pack no weights in main memory"
        found.append(f"{settings.origin('page_out')}: has no effect, because {reason}")
    return found


def cache_space() -> int | None:
    """Return the bytes that ``VLLM_CPU_KVCACHE_SPACE`` asks for, or ``None``.

    Raises:
        ConfigError: it is not a positive number of GiB.
    """
    text = os.environ.get(CACHE, "")
    try:
        size = int(float(text) * (1 << 30)) if text else None
    except (ValueError, OverflowError):
        size = -1
    if size is not None and size < 0:
        raise ConfigError(f"environment variable {CACHE}", None, f"a number of GiB is needed, not {text!r}")
    return size or None
