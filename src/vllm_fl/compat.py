"""Every place where a host attribute is replaced or added at run time, and every difference between host versions.

Nothing else in this package replaces vLLM's or PyTorch's attributes. Each replacement is a row of :data:`REPLACEMENTS`
with its reason and the host versions it is for; :func:`check_targets` finds the rows whose target has moved.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import variable_names

logger = get_logger(__name__)


@dataclass(frozen=True)
class Replacement:
    """One host attribute that is replaced or filled in.

    Args:
        target: ``module:attribute``; the attribute may be dotted.
        reason: what goes wrong without it.
        versions: the host versions that need it, as vLLM's major.minor; empty for all.
    """

    target: str
    reason: str
    versions: tuple[str, ...] = ()


SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"

REPLACEMENTS = (
    Replacement(
        "vllm.envs:environment_variables",
        "vLLM warns about unknown VLLM_* variables, or refuses them with --fail-on-environ-validation; ours are added.",
    ),
    Replacement(
        "torch.accelerator:empty_cache",
        "vLLM calls it at shutdown unless the platform is its own CPU platform; without an accelerator it raises.",
    ),
    Replacement("torch.accelerator:empty_host_cache", "The same."),
    Replacement("torch.accelerator:synchronize", "The same, and between steps."),
    Replacement(
        "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel",
        "A Triton kernel; there is no Triton driver on a CPU. Replaced through vLLM's own register_kernels.",
    ),
)


def host_version() -> str:
    """vLLM's version as major.minor."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


TESTED_HOSTS = ("0.32",)


@cache
def warn_of_untested_host() -> None:
    """One WARNING on a vLLM that the tests did not run on, with what is known to be missing there."""
    if host_version() not in TESTED_HOSTS:
        missing = "; ".join(check_targets()) or "every attribute that is replaced is there"
        tested = ", ".join(TESTED_HOSTS)
        logger.warning("vLLM %s is not a tested version (%s): %s", host_version(), tested, missing)


def check_targets() -> list[str]:
    """The replacements for this host version whose target does not exist, in words."""
    missing = []
    for row in REPLACEMENTS:
        if row.versions and host_version() not in row.versions:
            continue
        module, _, attribute = row.target.partition(":")
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name, None)
        if found is None:
            missing.append(f"{row.target} is gone in vLLM {host_version()}: {row.reason}")
    return missing


# -- environment variables --------------------------------------------------------------------------------------------


def declare_variables() -> None:
    """Tell vLLM the names of our environment variables. Idempotent; also right when the platform stays off."""
    from vllm import envs

    for name in variable_names():
        if name.startswith("VLLM_"):
            envs.environment_variables.setdefault(name, _reader(name))


def _reader(name: str) -> Callable[[], str | None]:
    return lambda: os.environ.get(name)


def in_tree_platform() -> str | None:
    """The name of the vLLM platform that would run without ours, or ``None``."""
    from vllm import platforms

    return next((name for name, found in platforms.builtin_platform_plugins.items() if found() is not None), None)


# -- torch.accelerator without an accelerator -------------------------------------------------------------------------


def _no_accelerator(*args: Any, **kwargs: Any) -> None:
    return None


def silence_accelerator() -> None:
    """Make the ``torch.accelerator`` calls of vLLM's shared code do nothing where PyTorch has no accelerator."""
    if not torch.accelerator.is_available():
        for name in ("empty_cache", "empty_host_cache", "synchronize"):
            setattr(torch.accelerator, name, _no_accelerator)


# -- Triton kernels of the model runner -------------------------------------------------------------------------------


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slots: torch.Tensor,
    block_size: int,
    total_cp_world_size: int,
    total_cp_rank: int,
    cp_interleave: int,
    pad_id: int,
    *_: Any,
) -> None:
    """The cache slot of every token: ``block_table[request, position // block] * block + position % block``.

    Args:
        num_tokens, max_num_tokens: slots between these two are padding and get ``pad_id``.
        query_start_loc: ``[requests + 1]``; the requests' first tokens.
        positions: ``[tokens]``; position of each token in its sequence.
        block_table: ``[requests, blocks]``.
        slots: ``[max_num_tokens]``; overwritten.
    """
    if total_cp_world_size != 1:
        raise NotImplementedError("context parallelism is not supported by vllm_fl on this device")
    requests = torch.repeat_interleave(query_start_loc.diff())
    where = positions[: requests.shape[0]]
    blocks = block_table[requests, where // block_size].long()
    slots[: requests.shape[0]] = blocks * block_size + where % block_size
    slots[num_tokens:max_num_tokens] = pad_id


def replace_kernels() -> None:
    """Replace the Triton kernels that the V1 model runner launches in every step. Idempotent."""
    from vllm.triton_utils.dispatcher import KernelOverride, register_kernels
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    if not isinstance(ComputeSlotMappingKernel.kernel, KernelOverride):
        register_kernels({SLOT_MAPPING_KERNEL: slot_mapping})
