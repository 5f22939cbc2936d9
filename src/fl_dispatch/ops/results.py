"""Check results against the declaration: number, dtype, shape and strides as promised, values within the tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .declaration import Operator, Tolerance


def broken_promise(operator: Operator, args: Sequence[Any], result: Any) -> str:
    """Return how a result differs from the declared fake's result for these arguments; empty if it does not.

    A result in an argument that the call may write has that argument's strides. Strides of dimensions with one element,
    and of empty tensors, are free. Tensors without strides and selections have no promised strides.

    Args:
        operator: the declaration.
        args: all arguments in the declaration's order; only their dtypes, shapes and strides are read.
        result: an implementation's result.
    """
    if operator.fake is None or any(isinstance(arg, Tensor) and arg.layout is not torch.strided for arg in args):
        return ""
    got = flat(result)
    for one in got:
        if not isinstance(one, Tensor | None):
            return f"it returns something that is no tensor: {type(one).__name__}"
    wanted = flat(operator.fake(*map(without_data, args)))
    if len(wanted) != len(got):
        return f"it returns {len(got)} tensors, not {len(wanted)}"
    written = [tensor for _, tensor in operator.written(tuple(args)).values()]
    for index, (fake, real) in enumerate(zip(wanted, got, strict=True)):
        if fake is None or real is None:
            if fake is not real:
                return f"result {index} is {_kind(real)}, {_kind(fake)} is declared"
            continue
        for what in ("dtype", "shape", "layout"):
            if getattr(fake, what) != getattr(real, what):
                got_text, wanted_text = _text(getattr(real, what)), _text(getattr(fake, what))
                return f"result {index} has {what} {got_text}, {wanted_text} is declared"
        in_place = any(_has_same_layout(real, tensor) for tensor in written)
        if not in_place and fake.numel() and _strides(fake) != _strides(real):
            return f"result {index} has strides {real.stride()}, {fake.stride()} is declared"
    return ""


def errors(output: Tensor, wanted: Tensor, tolerance: Tolerance, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return each element's error, and its ratio to the tolerance.

    An overflow to infinity, and NaN where NaN is expected, have no error. Other NaN give NaN.

    Args:
        output: an implementation's output.
        wanted: the expected output, in a dtype at least as wide.
        tolerance: an element's tolerance.
        scale: magnitude of the values around an element, which multiplies the absolute part.
    """
    if wanted.is_floating_point() and wanted.itemsize == 1:  # PyTorch has no arithmetic for these
        wanted = wanted.float()
    actual = output.to(device=wanted.device, dtype=wanted.dtype)
    exact = actual.isinf() & (wanted.to(output.dtype).to(wanted.dtype) == actual)
    exact |= wanted.isnan() & actual.isnan()
    error = (actual - wanted).abs().masked_fill(exact, 0.0)
    limit = tolerance.atol * scale + tolerance.rtol * wanted.abs()
    return error, torch.where(error == 0, 0.0, error / limit)


def flat(result: Any) -> list[Any]:
    """Return the results of a call as a list, empty for no result."""
    if result is None:
        return []
    return list(result) if isinstance(result, tuple | list) else [result]


def without_data(value: Any) -> Any:
    """Replace a tensor with data by one without; return a tensor without strides, or another value, unchanged."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _has_same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same memory with the same strides."""
    places = [(tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()) for tensor in (one, other)]
    return places[0] == places[1]


def _kind(value: Any) -> str:
    return "None" if value is None else "a tensor"


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
