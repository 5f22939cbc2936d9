"""Whether all ranks of an engine chose the same implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator, get_ep_group, get_tp_group, get_world_group

from fl_dispatch import Manifest, RankDivergenceError, get_default_manager

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Choices = dict[str, Any]


def same_layers(model_config: ModelConfig) -> GroupCoordinator:
    """The ranks that compute parts of this rank's layers together; another pipeline stage has other layers.

    Data-parallel ranks of a model with experts are among them, for they exchange tokens in every such layer.
    """
    return get_ep_group() if model_config.is_moe else get_tp_group()


def refuse_divergence(group: GroupCoordinator) -> None:
    """Compare this rank's choices with the others'. Every rank must call it.

    What was chosen for an operator must be the same everywhere. What was chosen for one layer, and what has failed, is
    compared within ``group``: the ranks of :func:`same_layers`.

    Raises:
        RankDivergenceError: on every rank that sees a difference, with all of them.
    """
    operators, layers = _choices()
    differences = [*_differences(get_world_group(), operators), *_differences(group, layers)]
    if differences:
        raise RankDivergenceError(f"the ranks chose different implementations: {'; '.join(differences)}")


def refuse_other_manifest(manifest: Manifest, group: GroupCoordinator) -> None:
    """Compare this rank's manifest with those of a group that computes the same layers. Every rank must call it.

    Raises:
        RankDivergenceError: on every rank that sees another one, with what differs.
    """
    others: list[Any] = [None] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(others, manifest.as_data(), group=group.cpu_group)
    for rank, other in zip(group.ranks, others, strict=True):
        if other is not None and (different := manifest.differences(Manifest.from_data(other))):
            raise RankDivergenceError(f"the ranks froze different choices: {'; '.join(different)} (there: rank {rank})")


def _choices() -> tuple[Choices, Choices]:
    """The candidates of each branch, best first, by operator; and the same by layer, with what has failed."""
    manager = get_default_manager()
    operators: Choices = {}
    layers: Choices = {f"{op} failed": sorted(ids) for op, ids in manager.get_failed_impls().items()}
    for key, decision in manager.tables.root.decisions.items():
        chosen = [[impl.impl_id for impl in branch.candidates] for branch in decision.branches]
        (layers if "@" in key else operators)[key] = chosen
    return operators, layers


def _differences(group: GroupCoordinator, mine: Choices) -> list[str]:
    """What differs within a group, in words."""
    ranks: list[Any] = [None] * group.world_size
    dist.all_gather_object(ranks, mine, group=group.cpu_group)
    keys = [key for key in sorted(set().union(*ranks)) if len({str(other.get(key)) for other in ranks}) > 1]
    return [f"{key}: {[other.get(key) for other in ranks]} on ranks {group.ranks}" for key in keys]
