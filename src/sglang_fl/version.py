"""The installed version of SGLang, and the tested ones."""

from __future__ import annotations

from importlib.metadata import version

TESTED_HOSTS = ("0.5.23",)
"""Versions that all engine tests run on."""

SMOKE_TESTED_HOSTS = ("0.5.21",)
"""Versions on which small models gave the right tokens on a CPU; no other tests ran.

Older versions are known only from their source: up to 0.5.16 layers choose their forward when they are made, in
``MultiPlatformOp.dispatch_forward``.
"""


def host_version() -> str:
    """Return SGLang's version."""
    return version("sglang")
