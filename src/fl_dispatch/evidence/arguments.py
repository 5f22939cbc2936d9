"""Arguments of a call as they lie in memory: copies that keep strides and sharing, and what a call changed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]


def copied(args: Sequence[Any]) -> Arguments:
    """The same arguments in memory of their own. Views that shared memory share it again, gaps included."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        new = torch.empty(0, dtype=value.dtype, device=value.device)
        return new.set_(storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())

    return tuple(copy(value) for value in args)


def meta(value: Any) -> Any:
    """A tensor without data in place of one with data; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def double(value: Any, device: torch.device) -> Any:
    """A floating tensor in float64 and in memory of its own, another tensor copied, anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return value.to(device=device, dtype=dtype, copy=True)


def changed(names: Sequence[str], before: Arguments, after: Arguments, written: Sequence[str]) -> list[str]:
    """The parameters that a call changed although it must only read them.

    A change beside a written argument, in memory that its view skips, is named ``memory around 'x'``.

    Args:
        names: the parameters' names.
        before: the arguments, unchanged.
        after: a copy of them that the call was given. Its written arguments are restored.
        written: the parameters that the call may write.
    """
    for name, old, new in zip(names, before, after, strict=True):
        if name in written:
            new.copy_(old)
    found = []
    for name, old, new in zip(names, before, after, strict=True):
        if isinstance(new, Tensor) and name not in written and not _same_bits(old, new):
            found.append(f"'{name}'")
    if found:
        return found
    for name, old, new in zip(names, before, after, strict=True):
        if isinstance(new, Tensor):
            one, other = (_bytes(tensor) for tensor in (old, new))
            if not torch.equal(one, other):
                found.append(f"memory around '{name}'")
    return found


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two results are equal bit by bit."""
    return len(one) == len(other) and all(_same_bits(a, b) for a, b in zip(one, other, strict=True))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if one.is_floating_point():
        one, other = (tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor for tensor in (one, other))
    return torch.equal(one, other)


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, PyTorch fills new floating tensors with NaN, so that an element which nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operators that have no deterministic algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            switch.fill_uninitialized_memory = fill
