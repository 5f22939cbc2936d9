"""Communication between the ranks of one group, under either host.

Every exchange uses the six collectives of :class:`Collectives`. Two libraries provide them: ``torch.distributed`` with
the backend that the :class:`~fl_dispatch.devices.DeviceSpec` names (gloo, nccl, hccl, …), and FlagCX if ``FLAGCX_PATH``
names it. :class:`Communicator` builds on them what hosts also need, such as any layout, any dimension and parts of
different sizes.
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

from ...devices import detect_device
from ...settings import get_settings
from . import flagcx, one_shot

# PyTorch 2.13 renamed both.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives(Protocol):
    """The collectives that a library must provide, over contiguous tensors; ranks are those inside the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with the sum over the ranks."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Write all ranks' ``tensor``, in the order of the ranks, into ``output`` ``[ranks * n, ...]``."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        """Write this rank's part of the sum of the ranks' ``tensor`` ``[ranks * n, ...]`` into ``output``."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with that of rank ``source``."""

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to one rank; returns when ``tensor`` may be overwritten."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with the tensor that rank ``source`` sends."""

    def close(self) -> None:
        """Free the library's resources of the group."""


class TorchCollectives:
    """The collectives of a host's process group of ``torch.distributed``."""

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

    def close(self) -> None:
        pass


def refuse_missing_library(device_type: str) -> None:
    """Raise ``ConfigError`` if the user names a library that cannot be used for tensors of this device type."""
    if (path := get_settings().flagcx_path) is not None:
        flagcx.load(path, device_type)


def connect(
    device_group: ProcessGroup | None, cpu_group: ProcessGroup, ranks: Sequence[int], device_type: str
) -> Collectives:
    """Return the library for a group. Every rank of the group must call it.

    Args:
        device_group: the group that moves the tensors, unless another library does.
        cpu_group: the same ranks, for the rendezvous of another library.
        ranks: the group's ranks as ``torch.distributed`` numbers them.
        device_type: the PyTorch device type of the tensors.

    Raises:
        ConfigError: the user names a library that cannot be used.
    """
    path = get_settings().flagcx_path
    if path is None:
        return TorchCollectives(device_group, ranks)
    return flagcx.connect(flagcx.load(path, device_type), cpu_group, device_type)


def connect_sums(
    device_group: ProcessGroup | None, cpu_group: ProcessGroup, device: torch.device, collectives: Collectives
) -> one_shot.OneShotSums | None:
    """Return a faster way than the group's library to sum small tensors, or ``None``. Every rank must call it.

    It is meant for the group that shares each layer of a model, with two sums per layer.
    """
    if device_group is None or detect_device().shares_memory is None or not isinstance(collectives, TorchCollectives):
        return None
    return one_shot.connect(device_group, cpu_group, device, collectives.all_reduce)


class Communicator:
    """The exchanges within one group of ranks, for tensors of any layout. ``calls`` counts its collectives by name.

    Args:
        name: the host's name of the group.
        collectives: the library.
        rank: this rank's number in the group.
        ranks: the number of ranks.
        sums: sums small tensors; with ``None`` the library sums all.
    """

    def __init__(
        self, name: str, collectives: Collectives, rank: int, ranks: int, sums: one_shot.OneShotSums | None = None
    ) -> None:
        self.name, self.collectives, self.rank, self.ranks, self.sums = name, collectives, rank, ranks, sums
        self.calls: Counter[str] = Counter()
        _communicators.add(self)

    def all_reduce(self, tensor: Tensor, output: Tensor | None = None) -> Tensor:
        """Return the sum over the ranks.

        Args:
            tensor: the same shape on every rank.
            output: overwritten with the result and returned, may be ``tensor``; ``None`` for a new tensor.
        """
        part, result = tensor.contiguous(), _result(output, tensor, tuple(tensor.shape))
        whole = result if result.is_contiguous() else torch.empty_like(part)
        if self.sums is not None and self.sums.takes(part):
            self.calls["all_reduce in one kernel"] += 1
            self.sums.add(part, whole)
        else:
            self.calls["all_reduce"] += 1
            if whole is not part:
                whole.copy_(part)
            self.collectives.all_reduce(whole)
        return result if whole is result else result.copy_(whole)

    def reduce_scatter(
        self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Return this rank's part, ``sizes[rank]`` along ``dim``, of the sum over the ranks.

        Args:
            tensor: the same shape on every rank, ``sum(sizes)`` along ``dim``.
            dim: the dimension to divide.
            sizes: sizes of the ranks' parts; ``None`` for equal ones.
            output: overwritten with the result and returned; ``None`` for a new tensor.
        """
        self.calls["reduce_scatter"] += 1
        dim, rows = dim % tensor.dim(), tensor.shape[dim]
        if sizes is None:
            if rows % self.ranks:
                raise ValueError(f"{rows} rows cannot be divided equally among {self.ranks} ranks")
            sizes = [rows // self.ranks] * self.ranks
        if len(sizes) != self.ranks or sum(sizes) != rows:
            raise ValueError(f"{rows} rows cannot be divided into {list(sizes)} for {self.ranks} ranks")
        most, mine = max(sizes), sizes[self.rank]
        result = _result(output, tensor, _shape(tensor, dim, mine))
        part = result if mine == most and result.is_contiguous() else tensor.new_empty(_shape(tensor, dim, most))
        if part.numel():
            if dim == 0 and min(sizes) == most:
                whole = tensor.contiguous()
            else:
                whole = torch.cat([_padded(other, dim, most) for other in tensor.split_with_sizes(list(sizes), dim)])
            self.collectives.reduce_scatter(part, whole)
        return result if part is result else result.copy_(part.narrow(dim, 0, mine))

    def all_gather(
        self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Return all ranks' tensors, joined along ``dim``.

        Args:
            tensor: ``sizes[rank]`` long along ``dim``.
            dim: the dimension to join along.
            sizes: sizes of all ranks' tensors along ``dim``; ``None`` for equal ones.
            output: overwritten with the result and returned; ``None`` for a new tensor.
        """
        self.calls["all_gather"] += 1
        dim, rows = dim % tensor.dim(), tensor.shape[dim]
        sizes = [rows] * self.ranks if sizes is None else sizes
        if len(sizes) != self.ranks or sizes[self.rank] != rows:
            raise ValueError(f"rank {self.rank} of {self.ranks} has {rows} rows, not those of {list(sizes)}")
        most = max(sizes)
        result = _result(output, tensor, _shape(tensor, dim, sum(sizes)))
        mine = _padded(tensor, dim, most)
        in_order = dim == 0 and min(sizes) == most and result.is_contiguous()
        whole = result if in_order else mine.new_empty(_shape(mine, 0, self.ranks * mine.shape[0]))
        if whole.numel():
            self.collectives.all_gather(whole, mine)
        if whole is result:
            return result
        parts = whole.view(self.ranks, *mine.shape)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim, out=result)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with that of rank ``source`` of this group."""
        self.calls["broadcast"] += 1
        whole = tensor.contiguous()
        self.collectives.broadcast(whole, source)
        if whole is not tensor:
            tensor.copy_(whole)

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to rank ``target`` of this group."""
        self.calls["send"] += 1
        self.collectives.send(tensor.contiguous(), target)

    def receive(self, size: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """Return a tensor of this size from rank ``source`` of this group."""
        self.calls["recv"] += 1
        tensor = torch.empty(size, dtype=dtype, device=device)
        self.collectives.receive(tensor, source)
        return tensor

    def close(self) -> None:
        """Free the resources of this group."""
        self.sums = None
        self.collectives.close()


_communicators: WeakSet[Communicator] = WeakSet()


def report() -> dict[str, dict[str, int]]:
    """Return the collectives of every group in this process, and their numbers of calls."""
    return {communicator.name: dict(communicator.calls) for communicator in _communicators}


def _shape(like: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """Return the shape of a tensor, but with this size along ``dim``."""
    return (*like.shape[:dim], size, *like.shape[dim + 1 :])


def _result(output: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor for a result: ``output``, which must have this shape, or a new tensor."""
    if output is None:
        return like.new_empty(shape)
    if output.shape != shape:
        raise ValueError(f"the result has the shape {list(shape)}, but the output has {list(output.shape)}")
    return output


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return the tensor, contiguous and padded with zeros to this size along ``dim``."""
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor.contiguous()
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing)).contiguous()
