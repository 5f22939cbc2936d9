"""Arguments of a call in memory: copies that keep strides and sharing, and the changes made by a call."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import weight_forms

Arguments = tuple[Any, ...]


def copied(args: Sequence[Any]) -> Arguments:
    """Copy the arguments to new memory. Views that shared memory share it again, including gaps.

    Declared weights (:mod:`fl_dispatch.weight_forms`) are declared again.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        new = torch.empty(0, dtype=value.dtype, device=value.device)
        new.set_(storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())
        if hasattr(value, weight_forms.ATTRIBUTE):
            weight_forms.declare(new)
        return new

    return tuple(copy(value) for value in args)


GUARD_BYTES = 4096
"""Bytes before and after a guarded tensor."""


def guarded(args: Sequence[Any]) -> Arguments:
    """Copy the arguments as :func:`copied` does, between guards.

    In floating storages all memory outside the views is NaN: the gaps between rows, and 4 KiB before and after. An
    implementation that reads there gets a wrong result, even if it multiplies by 0.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    of_storage: dict[int, list[Tensor]] = {}
    for value in args:
        if isinstance(value, Tensor):
            of_storage.setdefault(value.untyped_storage().data_ptr(), []).append(value)
    for place, views in of_storage.items():
        size = views[0].untyped_storage().nbytes()
        whole = torch.zeros(size + 2 * GUARD_BYTES, dtype=torch.uint8, device=views[0].device)
        _guard(whole[GUARD_BYTES : GUARD_BYTES + size], whole, views)
        storages[place] = whole.untyped_storage()

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        offset = value.storage_offset() + GUARD_BYTES // value.element_size()
        new = torch.empty(0, dtype=value.dtype, device=value.device)
        return new.set_(storages[value.untyped_storage().data_ptr()], offset, value.shape, value.stride())

    return tuple(copy(value) for value in args)


def apart(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides in separate memory; gaps between its rows are NaN if the dtype has NaN."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(new.untyped_storage())
    if has_nan(tensor.dtype):
        whole.fill_(math.nan)
    else:
        whole.view(torch.uint8).zero_()
    return new.copy_(tensor.detach())


def _guard(inside: Tensor, whole: Tensor, views: list[Tensor]) -> None:
    """Copy the memory of the views into ``inside``, a part of ``whole``; fill other floating memory with NaN."""
    dtype = views[0].dtype
    if not has_nan(dtype) or any(view.dtype is not dtype for view in views):
        inside.copy_(_bytes(views[0]))
        return
    whole.view(dtype).fill_(math.nan)
    elements = inside.view(dtype)
    for view in views:
        elements.as_strided(view.shape, view.stride(), elements.storage_offset() + view.storage_offset()).copy_(view)


def has_nan(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating point with one number per element; two in a byte have no NaN and no wider type."""
    return dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2


def double(value: Any, device: torch.device) -> Any:
    """Return a tensor of floats in float64 and new memory, a copy of another tensor, or any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.float64 if has_nan(value.dtype) else value.dtype
    return value.to(device=device, dtype=dtype, copy=True)


def changed(names: Sequence[str], before: Arguments, after: Arguments, written: Sequence[str]) -> list[str]:
    """Return the parameters that a call changed although it may only read them.

    A change in memory that a written argument's view skips is named ``memory around 'x'``.

    Args:
        names: the parameters' names.
        before: the arguments, unchanged.
        after: the copy that was passed to the call. Its written arguments are restored.
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
    """Whether two results are equal bit by bit, with NaN in the same places and any NaN bits.

    CUDA's conversion to a half type sets all bits of a NaN, and a copy keeps its bits.
    """
    return len(one) == len(other) and all(_same_numbers(a, b) for a, b in zip(one, other, strict=True))


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if _same_bits(one, other):
        return True
    if one.shape != other.shape or one.dtype is not other.dtype or not one.is_floating_point():
        return False
    missing = [tensor.double().isnan() for tensor in (one, other)]
    return torch.equal(*missing) and _same_bits(one[~missing[0]], other[~missing[1]])


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
    """Make PyTorch fill new floating tensors with NaN in this block, to reveal elements that no kernel writes."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about operators without a deterministic algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            switch.fill_uninitialized_memory = fill


UNTOUCHED = -1.75
"""A number, exact in every floating dtype, that new memory holds inside :class:`MarkedMemory`."""

_NEW = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


class MarkedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which new floating tensors hold :data:`UNTOUCHED`: elements that still do were not written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _NEW and result.is_floating_point():
            result.fill_(UNTOUCHED)
        return result


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share bytes."""
    if not one.numel() or not other.numel() or one.device != other.device:
        return False
    (begin, end), (first, last) = _span(one), _span(other)
    return begin < last and first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def described(names: Sequence[str], args: Arguments) -> str:
    """Return the arguments in words, such as ``x bfloat16 [4, 256] strides (320, 1), epsilon 1e-06``."""

    def text(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        strides = "" if value.is_contiguous() else f" strides {value.stride()}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{strides}"

    return ", ".join(f"{name} {text(value)}" for name, value in zip(names, args, strict=True) if value is not None)
