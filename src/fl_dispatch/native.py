"""Tensors as native code takes them: by address, once it is known that data lies there.

A fake tensor, as tracing, exporting and the propagation of shapes make them, says that it is on the CPU and has no
data. Its address is 0, and that of a view into it a small number, so a test for 0 does not find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .errors import NotSupported


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_base: Callable[[Tensor], int] = getattr(torch._C, "_data_address", _storage)
"""A storage's address. ``data_ptr`` asks for memory to write to, which would unmark a weight (``weight_forms``)."""


def addresses(read: Iterable[Tensor | None], written: Iterable[Tensor] = ()) -> list[int | None]:
    """The addresses of tensors in main memory, first of those that are only read; ``None`` stays.

    Raises:
        NotSupported: a tensor is on another device, or has no data (it is fake, sparse, wrapped, or was freed).
    """
    found: list[int | None] = []
    tensor: Tensor | None = None
    try:
        for tensor in read:
            if tensor is None:
                found.append(None)
                continue
            if not ((base := _base(tensor)) or not tensor.numel()) or not tensor.is_cpu:
                raise absent(tensor)
            found.append(base + int(tensor.storage_offset()) * tensor.element_size())
        for tensor in written:
            if not (_base(tensor) or not tensor.numel()) or not tensor.is_cpu:
                raise absent(tensor)
            found.append(tensor.data_ptr())
    except RuntimeError as error:  # of a layout or a wrapper without a storage
        if isinstance(error, NotSupported) or tensor is None:
            raise
        raise absent(tensor) from error
    return found


def require_data(tensors: Iterable[Tensor]) -> None:
    """Make sure that data is there, on whatever device.

    Raises:
        NotSupported: a tensor has none.
    """
    for tensor in tensors:
        try:
            there = bool(_base(tensor)) or not tensor.numel()
        except RuntimeError as error:
            raise absent(tensor) from error
        if not there:
            raise absent(tensor)


def require(why_not: str) -> None:
    """Make sure that native code can take a call's arguments; it trusts their sizes and strides.

    Args:
        why_not: why it cannot, or an empty string. A caller need not have asked ``supports``.

    Raises:
        NotSupported: it cannot.
    """
    if why_not:
        raise NotSupported(why_not)


def absent(tensor: Tensor) -> NotSupported:
    """The error that a tensor has no data where it is needed."""
    kind = "" if type(tensor) is Tensor else f"{type(tensor).__name__} "
    what = f"a {kind}{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
    return NotSupported(f"{what} has no data that native code could read")
