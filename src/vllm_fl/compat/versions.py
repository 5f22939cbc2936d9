"""vLLM's version, and the versions that were tested."""

from __future__ import annotations


def host_version() -> str:
    """Return vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32", "0.33")
"""Versions that all engine tests run on, each with the PyTorch that it requires. Some features need one of these."""


def is_tested() -> bool:
    """Whether the host is a version that all tests ran on."""
    return host_version() in TESTED_HOSTS
