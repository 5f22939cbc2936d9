"""vLLM's version, the versions that were tested, and a warning on any other."""

from __future__ import annotations

from functools import cache

from fl_dispatch.hosting.facts import untested

from ..host import HOST


def host_version() -> str:
    """vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32", "0.33")
"""All engine tests run on these, each on the PyTorch that it asks for. Some features are served on these alone."""


def is_tested() -> bool:
    """Whether the host is a version that all tests ran on."""
    return host_version() in TESTED_HOSTS


@cache
def warn_of_untested_host() -> None:
    """Log one WARNING on a vLLM that not all tests ran on, with the names we rely on that it lacks."""
    untested.warn_if_untested(HOST, host_version(), TESTED_HOSTS, "torch")
