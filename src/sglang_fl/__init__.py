"""SGLang on any chip: the thin plugin that connects SGLang to the dispatch core."""

from __future__ import annotations

__version__ = "0.1.0"


def activate_platform() -> str | None:
    """Entry point ``sglang.srt.platforms``: return our platform's class path, or ``None`` for SGLang's own."""
    from .platform import startup

    return startup.detect()


def load_plugin() -> None:
    """Entry point ``sglang.srt.plugins``: register our hooks, if the platform is ours."""
    from .platform import startup

    startup.run_if_active(_register_hooks)


def _register_hooks() -> None:
    from . import hook_table

    hook_table.register()
