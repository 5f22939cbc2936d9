"""The version of SGLang beside us."""

from __future__ import annotations

from importlib.metadata import version


def host_version() -> str:
    """SGLang's version."""
    return version("sglang")
