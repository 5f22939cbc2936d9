"""Communication between the ranks of one group: vLLM's device communicator for every device that has a spec.

Every exchange is made of the six collectives of :class:`Collectives`. Two libraries provide them: ``torch.distributed``
with the backend that the :class:`~fl_dispatch.device.DeviceSpec` names (gloo, nccl, hccl, …), and FlagCX where
``FLAGCX_PATH`` names it. What vLLM asks for beyond the six, such as parts of different sizes and the exchange of tokens
between experts, is put together here.

Pipeline stages send their tensors through ``torch.distributed`` directly: vLLM has no hook there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from fl_dispatch.settings import get_settings

from . import flagcx

# PyTorch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_communicators: WeakSet[CommunicatorFL] = WeakSet()


class Collectives(Protocol):
    """What a library must provide, over contiguous tensors; ranks are those inside the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with the sum over the ranks."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Write all ranks' ``tensor``, in the order of the ranks, into ``output`` ``[ranks * n, ...]``."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        """Write this rank's part of the sum of the ranks' ``tensor`` ``[ranks * n, ...]`` into ``output``."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with the one of rank ``source``."""

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to one rank; returns when ``tensor`` may be overwritten."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with what rank ``source`` sends."""


class TorchCollectives:
    """The collectives of a process group of ``torch.distributed``."""

    def __init__(self, group: ProcessGroup | None, ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, ranks

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        _all_gather(output, tensor, group=self.group)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        _reduce_scatter(output, tensor, group=self.group)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, self.ranks[source], group=self.group)

    def send(self, tensor: Tensor, target: int) -> None:
        dist.send(tensor, self.ranks[target], group=self.group)

    def receive(self, tensor: Tensor, source: int) -> None:
        dist.recv(tensor, self.ranks[source], group=self.group)


class CommunicatorFL(DeviceCommunicatorBase):
    """The communicator of one group of ranks. ``calls`` counts its collectives by name."""

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
        self.calls: Counter[str] = Counter()
        self.collectives = self._collectives()
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)
        _communicators.add(self)

    def _collectives(self) -> Collectives:
        path = get_settings().flagcx_path
        if path is None:
            return TorchCollectives(self.device_group, self.ranks)
        return flagcx.connect(flagcx.load(path, self.device.type), self.cpu_group)

    # -- the sum over the ranks, and its parts ------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over the ranks. Overwrites ``input_`` where it is contiguous, as vLLM's own communicators may."""
        self.calls["all_reduce"] += 1
        result = input_.contiguous()
        self.collectives.all_reduce(result)
        return result

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This rank's part along ``dim`` of the sum over the ranks; the size of ``dim`` is a multiple of the ranks."""
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        """This rank's part, ``sizes[rank]`` along ``dim``, of the sum over the ranks.

        Args:
            input_: the same shape on every rank, ``sum(sizes)`` along ``dim``.
            sizes: of the ranks' parts; equal ones where it is ``None``.
        """
        self.calls["reduce_scatter"] += 1
        parts = input_.movedim(dim, 0)
        if sizes is None:
            if parts.shape[0] % self.world_size:
                raise ValueError(f"{parts.shape[0]} rows cannot be divided equally among {self.world_size} ranks")
            sizes = [parts.shape[0] // self.world_size] * self.world_size
        if sum(sizes) != parts.shape[0]:
            raise ValueError(f"the parts {sizes} have {sum(sizes)} rows together, but the tensor has {parts.shape[0]}")
        most, mine = max(sizes), sizes[self.rank_in_group]
        padded = _pad(parts.split(sizes), most) if min(sizes) != most else parts.contiguous()
        output = parts.new_empty((most, *parts.shape[1:]))
        if most:
            self.collectives.reduce_scatter(output, padded)
        return output[:mine].movedim(0, dim).contiguous()

    # -- everybody's parts --------------------------------------------------------------------------------------------

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """All ranks' tensors of one shape, joined along ``dim``."""
        return self._gather(input_, dim, None)

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """All ranks' tensors, joined along ``dim``; one result for each of several tensors.

        Args:
            input_: ``sizes[rank]`` long along ``dim``.
            sizes: of all ranks' tensors along ``dim``; equal ones where it is ``None``.
        """
        if isinstance(input_, Tensor):
            return self._gather(input_, dim, sizes)
        return [self._gather(tensor, dim, sizes) for tensor in input_]

    def _gather(self, tensor: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
        self.calls["all_gather"] += 1
        part = tensor.movedim(dim, 0)
        sizes = [part.shape[0]] * self.world_size if sizes is None else sizes
        if sizes[self.rank_in_group] != part.shape[0]:
            raise ValueError(f"rank {self.rank_in_group} has {part.shape[0]} rows, not those of {sizes}")
        most = max(sizes)
        output = part.new_empty((self.world_size * most, *part.shape[1:]))
        if most:
            self.collectives.all_gather(output, _pad((part,), most))
        if min(sizes) != most:
            blocks = output.unflatten(0, (self.world_size, most))
            output = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
        return output.movedim(0, dim).contiguous()

    # -- from one rank to another -------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor``, which is contiguous, with the one of rank ``src`` of this group."""
        self.calls["broadcast"] += 1
        self.collectives.broadcast(tensor, src)
        return tensor

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send to rank ``dst`` of this group, the next one by default."""
        self.calls["send"] += 1
        self.collectives.send(tensor.contiguous(), (self.rank_in_group + 1) % self.world_size if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor from rank ``src`` of this group, the previous one by default."""
        self.calls["recv"] += 1
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.collectives.receive(tensor, (self.rank_in_group - 1) % self.world_size if src is None else src)
        return tensor

    # -- tokens to the ranks that have their experts, and back --------------------------------------------------------

    def dispatch_router_logits(self, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """All ranks' tokens and router logits."""
        return self._experts("dispatch").dispatch_router_logits(hidden_states, router_logits, *args, **kwargs)

    def dispatch(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """All ranks' tokens, with the weights and the ids of their experts."""
        return self._experts("dispatch").dispatch(hidden_states, topk_weights, topk_ids, *args, **kwargs)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """The sums of all ranks' experts for this rank's tokens."""
        result: Tensor = self._experts("combine").combine(hidden_states, is_sequence_parallel)
        return result

    def _experts(self, call: str) -> Any:
        self.calls[call] += 1
        if self.all2all_manager is None:
            raise RuntimeError(f"group '{self.unique_name}' exchanges no tokens between experts")
        return self.all2all_manager

    def destroy(self) -> None:
        """Give back what the library holds for this group."""
        if isinstance(self.collectives, flagcx.FlagCXCollectives):
            self.collectives.close()


def _pad(parts: Sequence[Tensor], rows: int) -> Tensor:
    """The parts one after the other, ``rows`` rows each, contiguous; rows that are added are zero."""
    return torch.cat(
        [torch.nn.functional.pad(part, (0, 0) * (part.dim() - 1) + (0, rows - len(part))) for part in parts]
    )


def report() -> dict[str, dict[str, int]]:
    """Of every group in this process: its collectives and how often they were called."""
    return {communicator.unique_name: dict(communicator.calls) for communicator in _communicators}
