"""The installed version of SGLang, and the tested ones."""

from __future__ import annotations

from importlib.metadata import version

TESTED_HOSTS = ("0.5.23",)
"""All engine tests run on these."""

SMOKE_TESTED_HOSTS = ("0.5.21",)
"""On these small models ran on a CPU with right tokens; no other tests.

Older ones are known from their source alone: up to 0.5.16 layers choose their forward when they are made, in
``MultiPlatformOp.dispatch_forward``.
"""


def host_version() -> str:
    """SGLang's version."""
    return version("sglang")
