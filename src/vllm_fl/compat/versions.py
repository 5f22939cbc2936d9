"""vLLM's version, the versions that were tested, a warning on any other, and what an older one needs."""

from __future__ import annotations

from functools import cache

from fl_dispatch.hosting import checked_host

from ..host import HOST


def host_version() -> str:
    """vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32", "0.33")
"""All engine tests run on these, each on the PyTorch that it asks for. Features below are served on the same."""

SMOKE_TESTED_HOSTS = ("0.26",)
"""On these small models ran on a CPU, eagerly and in one process, with right tokens; few other tests."""

STATE_HOSTS = TESTED_HOSTS
"""Small models whose layers keep a state gave the right tokens on these."""

QUANTIZING_HOSTS = TESTED_HOSTS
"""The tests of quantized models and of a quantized KV cache run on these."""

SLEEP_BACKUP_HOSTS = TESTED_HOSTS
"""These back memory up that is neither the weights' nor the cache's while an engine sleeps on a GPU."""

JOINING_HOSTS = ("0.32", "0.33")
"""Small models gave the right tokens on these: rotations joined with the write of keys and values, and products of one
token joined with norms and gates.

Graphs with joined rotations read the slots of a step at one address, and made-up batches are filled with -1 there.
"""


@cache
def warn_of_untested_host() -> None:
    """One WARNING on a vLLM that not all tests ran on, with what does not hold there of what we rely on."""
    checked_host.warn_if_untested(HOST, host_version(), TESTED_HOSTS, SMOKE_TESTED_HOSTS, "torch")


def adapt() -> None:
    """Give an older vLLM, in a worker before its own part is made, the names of the tested one. Idempotent."""
    if host_version() == "0.26":
        from vllm.platforms import current_platform

        from fl_dispatch.devices import detect_device
        from fl_dispatch.devices.triton import why_unserved

        from . import v0_26

        v0_26.install(
            triton=not why_unserved(),
            pinned=detect_device().pin_memory,
            out_of_tree=current_platform.is_out_of_tree(),
        )
