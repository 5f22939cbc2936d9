"""Weights from a trainer into a live engine, on any device: over gloo, or through shared memory on one machine.

Both are backends of vLLM's weight transfer (``weight_transfer_config={"backend": "fl_gloo"}``), each with a worker's
and a trainer's half; vLLM's own backends need CUDA. A trainer sends the workers plain data, which also works over HTTP.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

SHARED = Path("/dev/shm")
CHUNK = 256 << 20  # bytes of shared memory at a time


@dataclass
class Parameters(WeightTransferUpdateInfo):
    """The parameters of one update, in the order of arrival.

    Args:
        names, dtypes, shapes: one entry per parameter; a dtype as ``"bfloat16"``.
        file: with shared memory, the file's name in :data:`SHARED`; it holds the parameters one after the other, each
            at a multiple of 64 bytes.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    file: str = ""

    def __post_init__(self) -> None:
        lengths = len(self.names), len(self.dtypes), len(self.shapes)
        if len(set(lengths)) > 1:
            raise ValueError(f"names, dtypes and shapes of an update must have equal lengths, not {lengths}")
        if self.file != Path(self.file).name:
            raise ValueError(f"the file of an update is a name in {SHARED}, not {self.file!r}")

    def __iter__(self) -> Iterator[tuple[str, torch.dtype, list[int]]]:
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            found = getattr(torch, dtype, None)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"parameter {name} has no dtype of PyTorch's: {dtype!r}")
            yield name, found, shape


def _parameters(weights: list[tuple[str, Tensor]], file: str = "") -> dict[str, Any]:
    names, tensors = zip(*weights, strict=True)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return asdict(Parameters(list(names), dtypes, [list(tensor.shape) for tensor in tensors], file))


def _places(parameters: Parameters) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
    """Yield each parameter with its first byte in the file."""
    begin = 0
    for name, dtype, shape in parameters:
        yield name, dtype, shape, begin
        begin += _padded(prod(shape) * dtype.itemsize)


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def _weights(source: WeightSource | None) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter of a source with its name; up to vLLM 0.32 the source itself is iterated."""
    assert source is not None
    given: Any = source
    if any(getattr(one, "owners", None) and 0 not in one.owners for one in _metadata(given)):
        raise ValueError("the trainer's first rank sends, but some parameters of the source lie on other ranks")
    return given.iter_full() if hasattr(given, "iter_full") else iter(given)


def _announced(source: WeightSource | None) -> list[tuple[str, Tensor]]:
    """Return names and shapes of a source's parameters, on ``meta``; up to vLLM 0.32 metadata is a method."""
    return [(one.name, torch.empty(one.shape, dtype=one.dtype, device="meta")) for one in _metadata(source)]


def _metadata(source: Any) -> list[Any]:
    return list(source.metadata() if callable(source.metadata) else source.metadata)


class _Reloading(WeightTransferEngine[Any, Parameters]):
    """A worker's half: weights arrive in the checkpoint's form, and layers are prepared as after loading."""

    update_info_cls = Parameters

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part of the weights, although a predictor's loader expects all of them at once."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        return None


# -- shared memory ----------------------------------------------------------------------------------------------------


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    """Initialization of shared memory, which needs no rendezvous."""


class SharedMemoryEngine(_Reloading):
    """A worker on the trainer's machine."""

    init_info_cls = NothingToAgree

    def init_transfer_engine(self, init_info: NothingToAgree) -> None:
        return None

    def receive_weights(self, update_info: Parameters) -> None:
        path = SHARED / update_info.file
        whole = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        for name, dtype, shape, begin in _places(update_info):
            bytes_ = whole[begin : begin + prod(shape) * dtype.itemsize]
            self.model.load_weights([(name, bytes_.view(dtype).view(shape).to(self.device))])


@dataclass
class SharedMemoryTrainerInfo(TrainerInitInfo):
    """Settings of a trainer on the workers' machine; ``chunk``: bytes of shared memory at a time, or a parameter's."""

    backend: ClassVar[str] = "fl_shm"
    chunk: int = CHUNK


class SharedMemoryTrainer(TrainerWeightTransferEngine[SharedMemoryTrainerInfo]):
    """A trainer's half. Every rank iterates its source; the first rank writes the file and announces it."""

    init_info_cls = SharedMemoryTrainerInfo
    chunk: int = CHUNK

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.chunk = init_info.chunk
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        if self.is_sender:
            self.client.start_weight_update()
        waiting: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in _weights(self.source):
            if waiting and size + tensor.nbytes > self.chunk:
                self._send(waiting)
                waiting, size = [], 0
            waiting.append((name, tensor.detach()))
            size += _padded(tensor.nbytes)
        if waiting:
            self._send(waiting)
        if self.is_sender:
            self.client.finish_weight_update()

    def _send(self, weights: list[tuple[str, Tensor]]) -> None:
        if not self.is_sender:
            return
        size = sum(_padded(tensor.nbytes) for _, tensor in weights)
        handle, path = tempfile.mkstemp(prefix="vllm-fl-", dir=SHARED)
        try:
            os.ftruncate(handle, size)
            told = _parameters(weights, Path(path).name)
            whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            for (_, dtype, shape, begin), (_, tensor) in zip(_places(Parameters(**told)), weights, strict=True):
                whole[begin : begin + tensor.nbytes].view(dtype).view(shape).copy_(tensor)
            self.client.update_weights(told)
        finally:
            os.close(handle)
            os.unlink(path)


# -- gloo -------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GlooInfo(WeightTransferInitInfo):
    """The rendezvous of the trainer and the workers; the trainer is rank 0 of ``world_size``."""

    master_address: str
    master_port: int
    world_size: int

    def join(self, rank: int) -> ProcessGroup:
        """Return the group of the trainer and all workers."""
        place = (self.master_address, self.master_port, rank, self.world_size)
        group: Any = stateless_init_torch_distributed_process_group(*place, backend="gloo")
        return group


class GlooEngine(_Reloading):
    """A worker for a trainer on any machine."""

    init_info_cls = GlooInfo
    group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GlooInfo) -> None:
        parallel = self.parallel_config
        self.group = init_info.join(1 + parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def receive_weights(self, update_info: Parameters) -> None:
        if self.group is None:
            raise RuntimeError("weights cannot arrive before init_weight_transfer_engine")
        for name, dtype, shape in update_info:
            weight = torch.empty(shape, dtype=dtype)
            self.group.broadcast(weight, 0).wait()
            self.model.load_weights([(name, weight.to(self.device))])

    def shutdown(self) -> None:
        self.group = None


@dataclass(kw_only=True)
class GlooTrainerInfo(TrainerInitInfo):
    """The place where the trainer waits for the workers; ``world_size``: all workers and the trainer."""

    backend: ClassVar[str] = "fl_gloo"
    master_address: str
    master_port: int
    world_size: int


class GlooTrainer(TrainerWeightTransferEngine[GlooTrainerInfo]):
    """A trainer's half. Every rank iterates its source; the first rank broadcasts while the workers receive."""

    init_info_cls = GlooTrainerInfo
    group: ProcessGroup | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            meeting = GlooInfo(
                master_address=init_info.master_address,
                master_port=init_info.master_port,
                world_size=init_info.world_size,
            )
            with ThreadPoolExecutor(1) as pool:
                told = pool.submit(client.init_weight_transfer_engine, asdict(meeting))
                engine.group = meeting.join(0)
                told.result()
        return engine

    def send_weights(self) -> None:
        if not self.is_sender:
            for _ in _weights(self.source):
                pass  # ranks that share parameters gather them together
            return
        assert self.group is not None
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self.client.update_weights, _parameters(_announced(self.source)))
            for _, tensor in _weights(self.source):
                self.group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()
            received.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.group = None
