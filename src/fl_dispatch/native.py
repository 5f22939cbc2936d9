"""Pass tensors to native code by address, after checking that their data exists.

A fake tensor, as made by tracing, export and shape propagation, claims to be on the CPU and has no data. Its address is
0, and a view into it has a small address, so a test for 0 does not find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .errors import NotSupported


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_base: Callable[[Tensor], int] = getattr(torch._C, "_data_address", _storage)
"""Return a storage's address. ``data_ptr`` requests writable memory, which would unmark a weight (``weight_forms``)."""


def addresses(read: Iterable[Tensor | None], written: Iterable[Tensor] = ()) -> list[int | None]:
    """Return the addresses of tensors in main memory, those only read first; ``None`` stays ``None``.

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
    except RuntimeError as error:  # a layout or a wrapper class without a storage
        if isinstance(error, NotSupported) or tensor is None:
            raise
        raise absent(tensor) from error
    return found


def require_data(tensors: Iterable[Tensor]) -> None:
    """Check that tensors have data, on any device.

    Raises:
        NotSupported: a tensor has no data.
    """
    for tensor in tensors:
        try:
            there = bool(_base(tensor)) or not tensor.numel()
        except RuntimeError as error:
            raise absent(tensor) from error
        if not there:
            raise absent(tensor)


def require(why_not: str) -> None:
    """Check that native code can take a call's arguments, because it trusts their sizes and strides.

    Args:
        why_not: why it cannot; empty if it can. Callers need not have asked ``supports``.

    Raises:
        NotSupported: ``why_not`` is not empty.
    """
    if why_not:
        raise NotSupported(why_not)


def absent(tensor: Tensor) -> NotSupported:
    """Return the error for a tensor without data."""
    kind = "" if type(tensor) is Tensor else f"{type(tensor).__name__} "
    what = f"a {kind}{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
    return NotSupported(f"{what} has no data that native code could read")
