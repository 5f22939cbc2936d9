"""Check that all ranks of an engine run the same implementations. Groups must be able to exchange Python objects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...compiled.manifest import Manifest
from ...errors import RankDivergenceError
from ...logger_manager import get_logger
from ...manager import get_default_manager
from ...settings import get_settings
from ..start import aten, tactics

logger = get_logger(__name__)

T = TypeVar("T")
Choices = dict[str, Any]


def refuse_divergence(all_ranks: ProcessGroup, same_layers: ProcessGroup) -> None:
    """Compare this rank's choices with the others'. Every rank must call it.

    The choice for an operator must be the same on all ranks. Choices for single layers, and failures, are compared
    within ``same_layers``: the ranks that share this rank's layers.

    Raises:
        RankDivergenceError: on every rank that sees a difference, with all differences; or with the platforms' files of
            the ranks, if these differ.
    """
    _refuse_other_files(all_ranks)
    operators, layers = _choices()
    differences = [*_differences(all_ranks, operators), *_differences(same_layers, layers)]
    if differences:
        raise RankDivergenceError(f"the ranks chose different implementations: {'; '.join(differences)}")


def _refuse_other_files(all_ranks: ProcessGroup) -> None:
    """Refuse ranks that read another platform file than the first rank."""
    read = [file or "none" for file in gather(all_ranks, get_settings().platform_file)]
    ranks = dist.get_process_group_ranks(all_ranks)
    contents = [file.rpartition("(")[2] for file in read]  # equal content may be at different paths
    if len(set(contents)) > 1:
        named = "; ".join(f"rank {rank}: {file}" for rank, file in zip(ranks, read, strict=True))
        raise RankDivergenceError(
            f"the ranks read different files with the platform's defaults: {named}; copy one file to every machine"
        )


def agree_on_replaced_operators(all_ranks: ProcessGroup) -> None:
    """Return to PyTorch on all ranks each ATen operator that a backend got wrong on one. Every rank must call it.

    Call it when learning ends, before the ranks compare their manifests, which name the replaced operators.
    """
    ranks = dist.get_process_group_ranks(all_ranks)
    for rank, wrong in zip(ranks, gather(all_ranks, aten.settle()), strict=True):
        aten.leave({name: {key: f"on rank {rank}: {why}" for key, why in keys.items()} for name, keys in wrong.items()})


def agree_on_tactics(all_ranks: ProcessGroup) -> None:
    """Choose the same configuration of each timed kernel on all ranks, and by default time no kernel from then on.

    At each key the choice of an earlier start counts, else that of the lowest rank; the manifest lists the choices.
    Every rank must call it, when kernels are warm and no graph holds them yet. It has no effect once timing has ended.
    """
    if not everywhere(all_ranks, not tactics.is_sealed()):
        return
    found = gather(all_ranks, tactics.chosen())
    agreed, known = tactics.united(found), 0
    if agreed and dist.get_rank(all_ranks) == 0:
        agreed, known = tactics.remembered(agreed)
    agreed = gather(all_ranks, agreed)[0]
    tactics.install(agreed)
    if get_settings().seal_tactics:
        tactics.seal()
    get_default_manager().freezer.add_tactics(tactics.stored(agreed))
    if elsewhere := tactics.timed_elsewhere():
        level = logging.WARNING if len(found) > 1 else logging.INFO
        logger.log(level, "kernels are chosen by timing, for this process alone: %s", "; ".join(elsewhere))
    threads = gather(all_ranks, tactics.processor())
    if len(set(threads)) > 1 and dist.get_rank(all_ranks) == 0:
        logger.warning("ranks have other threads or processors, so equal products may differ: %s", "; ".join(threads))
    if agreed and dist.get_rank(all_ranks) == 0:
        keys, differ = sum(map(len, agreed.values())), tactics.differing(found, agreed)
        logger.info(
            "tactics: %d kernels at %d keys, %d known from earlier starts; ranks had others in %d",
            *(len(agreed), keys, known, differ),
        )


def refuse_other_manifest(manifest: Manifest, same_layers: ProcessGroup) -> None:
    """Compare this rank's manifest with those of ranks with the same layers. Every rank must call it.

    Raises:
        RankDivergenceError: the manifests differ; raised on every rank that sees it, with the differences.
    """
    ranks = dist.get_process_group_ranks(same_layers)
    for rank, other in zip(ranks, gather(same_layers, manifest.as_data()), strict=True):
        if different := manifest.differences(Manifest.from_data(other)):
            raise RankDivergenceError(f"the ranks froze different choices: {'; '.join(different)} (there: rank {rank})")


def warn_of_unmatched_scopes(stages: ProcessGroup) -> None:
    """Log on the first stage each rule that fits no layer of any pipeline stage. Every rank must call it."""
    manager = get_default_manager()
    unmatched = gather(stages, manager.unmatched_scopes())
    if dist.get_rank(stages) == 0:
        manager.warn_of_unmatched_scopes(*unmatched[1:])


def everywhere(all_ranks: ProcessGroup, holds: bool) -> bool:
    """Whether something holds on all ranks. Every rank must call it."""
    return all(gather(all_ranks, holds))


def on_all(all_ranks: ProcessGroup, names: Sequence[str]) -> list[str]:
    """Return the names that all ranks have, in this rank's order. Every rank must call it."""
    common = set(names).intersection(*gather(all_ranks, list(names)))
    return [name for name in names if name in common]


def together(all_ranks: ProcessGroup, mine: Sequence[T]) -> list[T]:
    """Return the values of all ranks without repetitions, in the order of the ranks. Every rank must call it."""
    return list(dict.fromkeys(one for theirs in gather(all_ranks, list(mine)) for one in theirs))


def gather(group: ProcessGroup, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks. Every rank must call it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _choices() -> tuple[Choices, Choices]:
    """Return each branch's candidates, best first, by operator; and the same by layer, with failures."""
    manager = get_default_manager()
    operators: Choices = {}
    layers: Choices = {f"{op} failed": sorted(ids) for op, ids in manager.get_failed_impls().items()}
    for key, plan in manager.table_keeper.root.plans.items():
        chosen = [[impl.impl_id for impl in branch.candidates] for branch in plan.decision.branches]
        (layers if "@" in key else operators)[key] = chosen
    return operators, layers


def _differences(group: ProcessGroup, mine: Choices) -> list[str]:
    """Return the differences within a group, in words."""
    choices, ranks = gather(group, mine), dist.get_process_group_ranks(group)
    keys = [key for key in sorted(set().union(*choices)) if len({str(other.get(key)) for other in choices}) > 1]
    return [f"{key}: {[other.get(key) for other in choices]} on ranks {ranks}" for key in keys]
