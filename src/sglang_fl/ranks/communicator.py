"""Communication between the ranks of one group, replacing SGLang's ``GroupCoordinator`` over a device group.

SGLang has no interface for a communicator, so the coordinator's methods are hooked, with their names, arguments and
results; the collectives are in :mod:`fl_dispatch.hosting.ranks.collectives`. A group of one rank stays SGLang's.

These stay SGLang's for any group:

- objects and barriers, which travel over the CPU group;
- the tensors of pipeline stages (``send_tensor_dict`` and similar), which SGLang sends without waiting;
- fusions of compiled kernels (``quant_all_reduce``, ``fused_allreduce_rmsnorm``);
- ``all_to_all_single`` and ``gather``, which no served model calls;
- direct calls of ``torch.distributed``, such as the sampler's agreement on tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.ranks import agreement
from fl_dispatch.hosting.ranks.collectives import Communicator, connect, connect_sums

from ..compat.hooks import Kind

if TYPE_CHECKING:
    from fl_dispatch import Manifest

TENSOR_PARALLEL = "tp"
"""Prefix of SGLang's name of the group that shares each layer."""
COMMUNICATOR = Attached[Communicator]("fl_communicator")
"""The communicator of a group of several ranks."""


def connect_group(result: None, group: GroupCoordinator, *args: Any, **kwargs: Any) -> None:
    """Connect the ranks of a group after it is made, which all of them do together."""
    if group.world_size > 1:
        collectives = connect(group.device_group, group.cpu_group, group.ranks, group.device.type)
        sums = None
        if group.unique_name.startswith(TENSOR_PARALLEL):
            sums = connect_sums(group.device_group, group.cpu_group, group.device, collectives)
        ours = Communicator(group.unique_name, collectives, group.rank_in_group, group.world_size, sums)
        COMMUNICATOR.give(group, ours)


def close_group(original: Callable[..., None], group: GroupCoordinator) -> None:
    """Free the library's resources of a group before it is destroyed."""
    if (communicator := COMMUNICATOR.find(group)) is not None:
        communicator.close()
    original(group)


def _unless(original_runs: Callable[[GroupCoordinator], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate our method for a group; the original runs if ``original_runs`` is true for the group."""

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ours)
        def around(original: Callable[..., Any], group: GroupCoordinator, *args: Any, **kwargs: Any) -> Any:
            return (original if original_runs(group) else ours)(group, *args, **kwargs)

        return around

    return decorate


def _sums_in_one_order(group: GroupCoordinator) -> bool:
    """Whether SGLang makes a sum's parts from ``all_reduce``, which is ours."""
    return group.world_size == 1 or envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get()


_several_ranks = _unless(lambda group: group.world_size == 1)
_any_order = _unless(_sums_in_one_order)


# -- the sum over the ranks, and its parts ----------------------------------------------------------------------------


@_several_ranks
def all_reduce(group: GroupCoordinator, input_: Tensor) -> Tensor:
    """Overwrite ``input_`` with the sum over the ranks, and return it."""
    return COMMUNICATOR.of(group).all_reduce(input_, input_)


@_any_order
def reduce_scatter_tensor(group: GroupCoordinator, output: Tensor, input: Tensor) -> None:
    """Write this rank's part of the sum of ``input`` ``[ranks * n, ...]`` into ``output`` ``[n, ...]``."""
    COMMUNICATOR.of(group).reduce_scatter(input.reshape(-1), output=output.view(-1))


@_several_ranks
def reduce_scatter(group: GroupCoordinator, output: Tensor, input_list: Sequence[Tensor]) -> Tensor:
    """Write the sum of the ranks' ``input_list[rank]`` into ``output``, and return it."""
    parts = [part.reshape(-1) for part in input_list]
    COMMUNICATOR.of(group).reduce_scatter(torch.cat(parts), sizes=[len(part) for part in parts], output=output.view(-1))
    return output


@_any_order
def reduce_scatterv(
    group: GroupCoordinator, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None
) -> Tensor:
    """Return this rank's part, ``sizes[rank]`` of dimension 0, of the sum over the ranks, written to ``output``."""
    return COMMUNICATOR.of(group).reduce_scatter(input_, 0, sizes, output)


# -- all ranks' parts -------------------------------------------------------------------------------------------------


@_several_ranks
def all_gather(
    group: GroupCoordinator, input_: Tensor, dim: int = -1, output_tensor_list: list[Tensor] | None = None
) -> Tensor | None:
    """Return all ranks' tensors of one shape, joined along ``dim``; or write each of them into one of a list."""
    if output_tensor_list is None:
        return COMMUNICATOR.of(group).all_gather(input_, dim)
    gathered = COMMUNICATOR.of(group).all_gather(
        input_.reshape(-1), sizes=[output.numel() for output in output_tensor_list]
    )
    parts = gathered.split_with_sizes([output.numel() for output in output_tensor_list])
    for output, part in zip(output_tensor_list, parts, strict=True):
        output.copy_(part.view(output.shape))
    return None


@_several_ranks
def all_gather_into_tensor(group: GroupCoordinator, output: Tensor, input: Tensor) -> None:
    """Write all ranks' ``input`` ``[n, ...]`` into ``output`` ``[ranks * n, ...]``."""
    COMMUNICATOR.of(group).all_gather(input.reshape(-1), output=output.view(-1))


@_several_ranks
def all_gatherv(
    group: GroupCoordinator,
    input_: Tensor | list[Tensor],
    sizes: list[int] | None = None,
    output: Tensor | None = None,
) -> list[Tensor]:
    """Return all ranks' tensors, ``sizes[rank]`` long, joined along the first dimension: always a list.

    Args:
        input_: a tensor or several, for which the sizes are the same.
        sizes: ``None`` for equal ones.
        output: overwritten with the result for a single tensor.
    """
    if isinstance(input_, Tensor):
        return [COMMUNICATOR.of(group).all_gather(input_, 0, sizes, output)]
    if output is not None:
        raise ValueError("all_gatherv writes into 'output' for a single tensor only")
    return [COMMUNICATOR.of(group).all_gather(tensor, 0, sizes) for tensor in input_]


# -- from one rank to another -----------------------------------------------------------------------------------------


@_several_ranks
def broadcast(group: GroupCoordinator, input_: Tensor, src: int = 0) -> Tensor:
    """Overwrite ``input_`` with that of rank ``src`` of this group, and return it."""
    COMMUNICATOR.of(group).broadcast(input_, src)
    return input_


@_several_ranks
def send(group: GroupCoordinator, tensor: Tensor, dst: int | None = None) -> None:
    """Send to rank ``dst`` of this group, the next one by default."""
    COMMUNICATOR.of(group).send(tensor, (group.rank_in_group + 1) % group.world_size if dst is None else dst)


@_several_ranks
def recv(group: GroupCoordinator, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
    """Receive a tensor from rank ``src`` of this group, the previous one by default."""
    source = (group.rank_in_group - 1) % group.world_size if src is None else src
    return COMMUNICATOR.of(group).receive(size, dtype, group.device, source)


# -- ranks ------------------------------------------------------------------------------------------------------------


def check_ranks() -> None:
    """Refuse to serve if ranks would choose differently; from now on ranks run in step. Every rank must call it.

    Call it once the model is loaded and its layers are bound. Rules that fit no layer of any stage are logged.

    Raises:
        RankDivergenceError: on every rank that sees a difference.
    """
    parallel = get_parallel()
    several = parallel.world_group.world_size > 1
    agreement.warn_of_unmatched_scopes(parallel.pp_group.cpu_group)
    if several:
        agreement.refuse_divergence(parallel.world_group.cpu_group, parallel.tp_group.cpu_group)
    get_default_manager().lockstep = several


def check_manifest(manifest: Manifest) -> None:
    """Refuse to serve if ranks have fixed different choices. Every rank must call it.

    Raises:
        RankDivergenceError: on every rank that sees a difference.
    """
    parallel = get_parallel()
    if parallel.world_group.world_size > 1:
        agreement.refuse_other_manifest(manifest, parallel.tp_group.cpu_group)


def agree_on_tactics() -> None:
    """Choose the same configuration of timed kernels on all ranks from now on. Every rank must call it."""
    agreement.agree_on_tactics(get_parallel().tp_group.cpu_group)


HOOKED: tuple[tuple[str, Callable[..., Any], Kind], ...] = (
    ("__init__", connect_group, "after"),
    ("destroy", close_group, "around"),
    ("all_reduce", all_reduce, "around"),
    ("reduce_scatter_tensor", reduce_scatter_tensor, "around"),
    ("reduce_scatter", reduce_scatter, "around"),
    ("reduce_scatterv", reduce_scatterv, "around"),
    ("all_gather", all_gather, "around"),
    ("all_gather_into_tensor", all_gather_into_tensor, "around"),
    ("all_gatherv", all_gatherv, "around"),
    ("broadcast", broadcast, "around"),
    ("send", send, "around"),
    ("recv", recv, "around"),
)
"""Methods of ``GroupCoordinator``, and how ours run; ``host_facts.yaml`` gives the reasons."""
