"""Communication between the ranks of one group: vLLM's device communicator for every device that has a spec.

The collectives are in :mod:`fl_dispatch.hosting.ranks.collectives`; this module gives them vLLM's names and arguments,
and exchanges tokens between experts.

Pipeline stages send their tensors directly through ``torch.distributed``, because vLLM has no hook there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from fl_dispatch.hosting.ranks.collectives import Communicator, connect, connect_sums

from ..compat.library import Capture

TENSOR_PARALLEL = "tp"
"""Prefix of vLLM's name of the group that shares each layer."""


class CommunicatorFL(DeviceCommunicatorBase):
    """The communicator of one group of ranks; its exchanges are counted under the group's name."""

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        *args: Any,
        **kwargs: Any,  # differs between vLLM's versions
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, *args, **kwargs)
        collectives = connect(self.device_group, self.cpu_group, self.ranks, self.device.type)
        sums = None
        if unique_name.startswith(TENSOR_PARALLEL) and self.world_size > 1:
            sums = connect_sums(self.device_group, self.cpu_group, self.device, collectives)
        self.communicator = Communicator(unique_name, collectives, self.rank_in_group, self.world_size, sums)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    # -- the sum over the ranks, and its parts ------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum over the ranks in new memory: compiled code may reuse the memory of ``input_``."""
        return self.communicator.all_reduce(input_)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part along ``dim``, a multiple of the ranks, of the sum over the ranks."""
        return self.communicator.reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        """Return this rank's part, ``sizes[rank]`` along ``dim``, of the sum over the ranks; equal parts by default."""
        return self.communicator.reduce_scatter(input_, dim, sizes)

    # -- all ranks' parts ---------------------------------------------------------------------------------------------

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return all ranks' tensors of one shape, joined along ``dim``."""
        return self.communicator.all_gather(input_, dim)

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """Return all ranks' tensors, ``sizes[rank]`` along ``dim``, joined there; a list gives a list."""
        if isinstance(input_, Tensor):
            return self.communicator.all_gather(input_, dim, sizes)
        return [self.communicator.all_gather(tensor, dim, sizes) for tensor in input_]

    # -- from one rank to another -------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``src`` of this group."""
        self.communicator.broadcast(tensor, src)
        return tensor

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send to rank ``dst`` of this group, the next one by default."""
        self.communicator.send(tensor, (self.rank_in_group + 1) % self.world_size if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor from rank ``src`` of this group, the previous one by default."""
        source = (self.rank_in_group - 1) % self.world_size if src is None else src
        return self.communicator.receive(size, dtype, self.device, source)

    # -- tokens to the ranks that have their experts, and back --------------------------------------------------------

    def dispatch_router_logits(self, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return all ranks' tokens and router logits."""
        return self._experts("dispatch").dispatch_router_logits(hidden_states, router_logits, *args, **kwargs)

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return all ranks' tokens, with the weights and the ids of their experts."""
        return self._experts("dispatch").dispatch(hidden_states, topk_weights, topk_ids, *args, **kwargs)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Return the sums of all ranks' experts for this rank's tokens."""
        result: Tensor = self._experts("combine").combine(hidden_states, is_sequence_parallel)
        return result

    def _experts(self, call: str) -> Any:
        self.communicator.calls[call] += 1
        if self.all2all_manager is None:
            raise RuntimeError(f"group '{self.unique_name}' exchanges no tokens between experts")
        return self.all2all_manager

    def destroy(self) -> None:
        """Free the library's resources of this group."""
        self.communicator.close()


def any_communicator(original: Capture) -> Capture:
    """Wrap ``GroupCoordinator.graph_capture`` for groups with any communicator.

    vLLM's function asks the communicator for its work before a capture, and knows two communicator classes. Ours has no
    such work, so the function runs as for a group without a communicator.
    """

    @wraps(original)
    @contextmanager
    def graph_capture(group: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        communicator = group.device_communicator
        with ExitStack() as stack:
            if isinstance(communicator, CommunicatorFL):
                group.device_communicator = None
            try:
                context = stack.enter_context(original(group, *args, **kwargs))
            finally:
                group.device_communicator = communicator
            yield context

    return graph_capture
