"""Collectives of the emulated NPU: the backend "hccl" is gloo, on the memory of NPU tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .aten import alias, has_kernel
from .graphs import refuse_to_record

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Make groups of gloo for "hccl", and let every ``c10d::`` operator work on aliases."""
    dist.Backend._plugins["HCCL"] = dist.Backend._BackendPlugin(_group, True)
    dist.Backend.backend_capability["hccl"] = ["npu", "cpu"]
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("c10d::") and has_kernel(full, "PrivateUse1"):
            name = full.removeprefix("c10d::")
            library.impl(name, _served(getattr(torch.ops.c10d, name).default), "PrivateUse1", allow_override=True)


class Group(dist.ProcessGroupGloo):
    """Gloo, with the collectives that ``torch_npu`` asks of the backend itself, past the dispatcher."""

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return super().allgather(into(outputs, []), into(inputs, []), *options)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return super().gather(into(outputs, []), into(inputs, []), *options)

    def batch_isend_irecv(self, operations: list[str], tensors: list[torch.Tensor], ranks: list[int]) -> Works:
        """Start each operation, named "isend" or "irecv"."""
        started = []
        for operation, tensor, rank in zip(operations, into(tensors, []), ranks, strict=True):
            start = super().send if operation == "isend" else super().recv
            started.append(start([tensor], rank, 0))
        return Works(started)


class Works:
    """Several transfers as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


_groups: list[Group] = []
"""Kept, because Python forgets the class of a group that only C++ holds."""


def _group(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    _groups.append(Group(options.store, options.group_rank, options.group_size, options.timeout))
    return _groups[-1]


def into(value: Any, originals: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The CPU's view of arguments; ``originals`` gets each NPU tensor with its alias."""
    if isinstance(value, list | tuple):
        return [into(item, originals) for item in value]
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        refuse_to_record("a collective")
        made = alias(value)
        made.owner = value  # type: ignore[attr-defined]  # as long as gloo holds the alias
        originals.append((value, made))
        return made
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def _served(operator: torch._ops.OpOverload) -> Any:
    def run(*args: Any) -> Any:
        originals: list[tuple[torch.Tensor, torch.Tensor]] = []

        def back(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(back(item) for item in value)
            return next((original for original, made in originals if made is value), value)

        return back(operator(*into(args, originals)))

    return run
