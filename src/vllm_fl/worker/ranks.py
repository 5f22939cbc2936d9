"""Check for equal choices on all ranks: vLLM's groups for :mod:`fl_dispatch.hosting.ranks.agreement`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import GroupCoordinator, get_ep_group, get_pp_group, get_tp_group, get_world_group

from fl_dispatch import Manifest
from fl_dispatch.hosting.ranks import agreement

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def same_layers(model_config: ModelConfig) -> GroupCoordinator:
    """Return the ranks that share this rank's layers; another pipeline stage has other layers.

    They include data-parallel ranks of a model with experts, which exchange tokens in every such layer.
    """
    return get_ep_group() if model_config.is_moe else get_tp_group()


def refuse_divergence(group: GroupCoordinator) -> None:
    """Compare this rank's choices with all ranks', and those for layers within a group. Every rank must call it."""
    agreement.refuse_divergence(get_world_group().cpu_group, group.cpu_group)


def agree_on_replaced_operators() -> None:
    """Return to PyTorch on all ranks each ATen operator that FlagGems got wrong on one. Every rank must call it."""
    agreement.agree_on_replaced_operators(get_world_group().cpu_group)


def agree_on_tactics() -> None:
    """Choose the same configuration of timed kernels on all ranks from now on. Every rank must call it."""
    agreement.agree_on_tactics(get_world_group().cpu_group)


def refuse_other_manifest(manifest: Manifest, group: GroupCoordinator) -> None:
    """Compare this rank's manifest with those of a group that computes the same layers. Every rank must call it."""
    agreement.refuse_other_manifest(manifest, group.cpu_group)


def warn_of_unmatched_scopes() -> None:
    """Log on the first stage each rule that fits no layer of any pipeline stage. Every rank must call it."""
    agreement.warn_of_unmatched_scopes(get_pp_group().cpu_group)


def everywhere(holds: bool) -> bool:
    """Whether something holds on all ranks. Every rank must call it."""
    return agreement.everywhere(get_world_group().cpu_group, holds)
