"""Does a result keep what the declaration promises about it? Number, dtype, shape and strides, never values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .declaration import Operator


def broken_promise(operator: Operator, args: Sequence[Any], result: Any) -> str:
    """How a result differs from what the declared fake computes for these arguments; empty if it does not.

    A result that is an argument which the call may write lies as that argument does. Strides of dimensions with one
    element, and those of empty tensors, are free.

    Args:
        operator: the declaration.
        args: all arguments in the declaration's order; only their dtypes, shapes and strides are read.
        result: what an implementation returned.
    """
    assert operator.fake is not None
    got = flat(result)
    for one in got:
        if not isinstance(one, Tensor | None):
            return f"it returns something that is no tensor: {type(one).__name__}"
    wanted = flat(operator.fake(*map(_meta, args)))
    if len(wanted) != len(got):
        return f"it returns {len(got)} tensors, not {len(wanted)}"
    written = [tensor for _, tensor in operator.written(tuple(args)).values()]
    for index, (fake, real) in enumerate(zip(wanted, got, strict=True)):
        if fake is None or real is None:
            if fake is not real:
                return f"output {index} is {type(real).__name__}, not {type(fake).__name__}"
            continue
        for what in ("dtype", "shape"):
            if getattr(fake, what) != getattr(real, what):
                return f"output {index} has the {what} {_text(getattr(real, what))}, not {_text(getattr(fake, what))}"
        same = any(real is tensor for tensor in written)
        if not same and fake.numel() and _strides(fake) != _strides(real):
            return f"output {index} has the strides {real.stride()}, not {fake.stride()}"
    return ""


def flat(result: Any) -> list[Any]:
    """The results of a call as a list, empty for none."""
    if result is None:
        return []
    return list(result) if isinstance(result, tuple | list) else [result]


def _meta(value: Any) -> Any:
    """A tensor without data in place of one with data; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
