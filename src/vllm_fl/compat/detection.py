"""Set-up before vLLM has a platform: the names of our variables, and the platform that vLLM would choose alone."""

from __future__ import annotations

import os
from collections.abc import Callable

from fl_dispatch.settings import variable_names


def declare_variables() -> None:
    """Declare our environment variables to vLLM. Idempotent, and harmless if the platform stays off."""
    from vllm import envs

    for name in variable_names():
        if name.startswith("VLLM_"):
            envs.environment_variables.setdefault(name, _reader(name))


def _reader(name: str) -> Callable[[], str | None]:
    return lambda: os.environ.get(name)


def in_tree_platform() -> str | None:
    """Return the name of the vLLM platform that would run without ours, or ``None``."""
    from vllm import platforms

    return next((name for name, found in platforms.builtin_platform_plugins.items() if found() is not None), None)
