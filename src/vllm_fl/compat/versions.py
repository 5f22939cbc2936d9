"""vLLM's version, the versions that were tested, and a warning on any other."""

from __future__ import annotations

from functools import cache

from fl_dispatch.logger_manager import get_logger

from .. import host_names
from . import replacements

logger = get_logger(__name__)


def host_version() -> str:
    """vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32",)
"""All engine tests run on these."""

SMOKE_TESTED_HOSTS = ("0.26", "0.33")
"""On these small models ran on a CPU, eagerly and in one process, with right tokens; no other tests."""


@cache
def warn_of_untested_host() -> None:
    """One WARNING on a vLLM that not all tests ran on, with what is known to be missing there."""
    version, tested = host_version(), ", ".join(TESTED_HOSTS)
    if version not in TESTED_HOSTS:
        gone = [*replacements.check_targets(version), *host_names.missing(version)]
        missing = "; ".join(gone) or "every name that is replaced or relied on is there"
        how = "only smoke-tested" if version in SMOKE_TESTED_HOSTS else "not a tested version"
        logger.warning("vLLM %s is %s (tested: %s): %s", version, how, tested, missing)
