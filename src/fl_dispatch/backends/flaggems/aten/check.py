"""Check a replaced operator against PyTorch's, on the arguments of a real call with random values.

The floating point values of a warm-up batch may all be zero, and zeros hide errors, so random values replace them.
Integers and booleans keep their values, because they may be indices. Shapes, strides, alignment and shared memory of
tensors also stay, because a product of a matrix with its own transpose has a separate kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Kernel = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Made = dict[tuple[int, int, torch.dtype, torch.device], Tensor]

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
    torch.float32: 2e-5,  # TensorFloat-32 does not pass
    torch.float64: 1e-9,
}
"""Tolerances, relative to the largest element and to each; tensors of other dtypes must be equal."""
CHUNK = 1 << 22
"""Elements that are compared at a time: 32 MiB in float64."""


def leaves(value: Any) -> Iterator[Any]:
    """Return the values in arguments or results, with lists and tuples flattened."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def size_of(values: Any) -> int:
    """Return the bytes of the tensors among arguments or results."""
    return sum(t.numel() * t.element_size() for t in leaves(values) if isinstance(t, Tensor))


def randomized(args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Arguments:
    """Copies of arguments with random floating point values."""
    generators: dict[torch.device, torch.Generator] = {}
    made: Made = {}

    def draw(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy, flat = _like(value, made)
        if value.dtype in TOLERANCE:
            if value.device not in generators:
                generators[value.device] = torch.Generator(value.device).manual_seed(seed)
            flat.copy_(torch.randn(flat.shape, generator=generators[value.device], device=value.device))
        return copy

    copied: Arguments = tree_map(draw, (args, dict(kwargs)))
    return copied


def copied(arguments: Arguments) -> Arguments:
    """Copies of arguments with the same values."""
    made: Made = {}
    result: Arguments = tree_map(lambda part: _like(part, made)[0] if isinstance(part, Tensor) else part, arguments)
    return result


def _like(tensor: Tensor, made: Made) -> tuple[Tensor, Tensor]:
    """Copy a tensor into new memory with its strides (also zeros) and alignment; return the copy and its flat memory.

    Tensors with the same first and last address share a copy: ``made`` keeps the copies.
    """
    sizes, strides = tensor.shape, tensor.stride()
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if tensor.numel() else 0
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    place = tensor.data_ptr(), length, tensor.dtype, tensor.device
    memory = made.get(place)
    if memory is None:
        memory = torch.empty(shift + length, dtype=tensor.dtype, device=tensor.device)[shift:]
        memory.copy_(tensor.as_strided((length,), (1,)))
        if length:
            made[place] = memory
    return memory.as_strided(sizes, strides), memory


def aliases(results: Any, arguments: Any) -> list[list[bool]]:
    """Return for each tensor among the results whether it shares memory with each tensor among the arguments."""
    places = [leaf.untyped_storage().data_ptr() for leaf in leaves(arguments) if isinstance(leaf, Tensor)]
    own = [leaf.untyped_storage().data_ptr() for leaf in leaves(results) if isinstance(leaf, Tensor)]
    return [[bool(place) and place == other for other in places] for place in own]


def differs(found: Any, expected: Any) -> str:
    """Return the difference between results, as a message, or an empty string."""
    ours, theirs = list(leaves(found)), list(leaves(expected))
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    return next(filter(None, map(_difference, ours, theirs)), "")


def _difference(found: Any, expected: Any) -> str:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        same = found is expected or (type(found) is type(expected) and found == expected)  # a NaN is not equal
        return "" if same else f"{found!r}, not {expected!r}"
    if (found.shape, found.dtype, found.device) != (expected.shape, expected.dtype, expected.device):
        return f"{_kind(found)}, not {_kind(expected)}"
    if not expected.numel():
        return ""
    if _strides(found) != _strides(expected):
        return f"strides {found.stride()}, not {expected.stride()}"
    if expected.dtype not in TOLERANCE:
        wrong = sum(int((ours != theirs).sum()) for ours, theirs in _chunks(found, expected))
        return f"{wrong} of {expected.numel()} elements differ" if wrong else ""
    return _distance(found, expected, TOLERANCE[expected.dtype])


def _distance(found: Tensor, expected: Tensor, tolerance: float) -> str:
    scale = worst = farthest = 0.0
    for part in _chunks(found, expected):
        ours, theirs = (tensor.double() for tensor in part)
        finite = theirs.isfinite()
        if not torch.equal(ours.nan_to_num(0.0, 1.0, -1.0)[~finite], theirs.nan_to_num(0.0, 1.0, -1.0)[~finite]) or (
            bool((ours.isfinite() != finite).any())
        ):
            return "other elements are infinite or no number"
        if not bool(finite.any()):
            continue
        ours, theirs = ours[finite], theirs[finite]
        apart = (ours - theirs).abs()
        scale = max(scale, float(theirs.abs().max()))
        farthest = max(farthest, float(apart.max()))
        worst = max(worst, float((apart - tolerance * theirs.abs()).max()))
    scale = min(scale, 1e300)
    if worst <= tolerance * max(scale, math.ulp(0.0)):
        return ""
    return f"{farthest:.3g} off, where the largest element is {scale:.3g}"


def _chunks(found: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split two tensors of one shape into views of about :data:`CHUNK` elements along the longest dimension."""
    if expected.numel() <= CHUNK:
        yield found, expected
        return
    longest = max(range(expected.dim()), key=lambda dim: expected.shape[dim])
    length = max(1, CHUNK * expected.shape[longest] // expected.numel())
    yield from zip(torch.split(found, length, longest), torch.split(expected, length, longest), strict=True)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions with more than one element; the others are arbitrary."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def waits_for_device(
    refuse_waits: Callable[[], AbstractContextManager[None]],
    run: Kernel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seed: int,
) -> bool:
    """Whether a kernel waits for the device after its first call, which rules out graph capture.

    Args:
        refuse_waits: of the :class:`~fl_dispatch.devices.DeviceSpec`.
        run, args, kwargs: the kernel and its arguments.
        seed: for the random values.
    """
    again = randomized(args, kwargs, seed)
    try:
        with refuse_waits():
            run(*again[0], **again[1])
    except RuntimeError as error:
        if "synchronizing" in str(error):
            return True
        raise
    return False
