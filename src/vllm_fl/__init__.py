"""vLLM on any chip: the thin plugin that connects vLLM to the dispatch core."""

from __future__ import annotations

from . import _alias

__version__ = "0.1.0"

_alias.install("vllm_fl.dispatch", "fl_dispatch")


def register_platform() -> str | None:
    """Entry point ``vllm.platform_plugins``: return our platform's class path, or ``None`` if vLLM's own should run."""
    from .platform.startup import detect

    return detect()


def register_ops() -> None:
    """Entry point ``vllm.general_plugins``: register our layers, if the platform is ours."""
    from .platform import startup

    startup.register_ops()
