"""vLLM's version, and the versions that were tested."""

from __future__ import annotations


def host_version() -> str:
    """vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32", "0.33")
"""All engine tests run on these, each on the PyTorch that it asks for. Some features are served on these alone."""


def is_tested() -> bool:
    """Whether the host is a version that all tests ran on."""
    return host_version() in TESTED_HOSTS
