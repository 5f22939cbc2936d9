"""Copies of everything that an implementation may write, which come back before another implementation runs.

An operator that nobody declared may write whatever its arguments reach: tensors, arrays, containers, attributes of
objects. A thing without a copy, such as a generator, does not come back, so the failure is raised.
"""

from __future__ import annotations

import enum
import operator
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

MOST_THINGS = 10_000  # an argument that reaches more reaches the whole program, and nobody wants that copied
_CONTAINERS = (list, deque, dict, set, bytearray)
_IMMUTABLE = (
    types.NoneType,
    types.EllipsisType,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    enum.Enum,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
_POINTER = tuple.__itemsize__
_MADE_BY_A_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_ABSENT = object()


def mutable_parts(values: Iterable[Any]) -> list[Any]:
    """Every mutable thing that values reach; a tensor as often as it is reached."""
    parts: list[Any] = []
    known: dict[int, Any] = {}  # keeps the things, because an id is used again once its thing is gone
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            parts.append(value)
        elif not isinstance(value, _IMMUTABLE) and not _is_scalar(value) and id(value) not in known:
            known[id(value)] = value
            if len(known) > MOST_THINGS:
                return [*parts, iter(())]  # which has no copy
            if not isinstance(value, tuple | frozenset) and (_slots(value) or not _is_open(value)):
                parts.append(value)
            pending += _held(value)
            if hasattr(value, "__dict__"):
                pending.append(vars(value))
    return parts


def copies_of(parts: Iterable[Any]) -> list[Any] | None:
    """A copy of each part; ``None`` if one has none."""
    copies: list[Any] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            try:
                with torch.no_grad():
                    copies.append(part.clone())
            except RuntimeError:  # it does not fit into memory twice, say
                return None
        elif _is_array(part) and not part.dtype.hasobject:
            copies.append(part.copy())
        elif isinstance(part, _CONTAINERS) or _is_open(part):
            copies.append(_held(part))
        else:
            return None
    return copies


def put_back(parts: Sequence[Any], copies: Sequence[Any] | None) -> bool:
    """Give parts their old values; returns whether all have them."""
    if copies is None:
        return not parts
    return all(_has_back(part, copy) for part, copy in zip(parts, copies, strict=True))


def _has_back(part: Any, copy: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return _tensor_has_back(part, copy)
    if _is_array(part):
        if (part.shape, part.dtype) != (copy.shape, copy.dtype):
            return False
        if part.flags.writeable:
            part[...] = copy
        return bool(part.tobytes() == copy.tobytes())
    held = _held(part)
    if len(held) == len(copy) and all(map(operator.is_, held, copy)):
        return True  # others may be reading it: what did not change is not touched
    if isinstance(part, list | bytearray):
        part[:] = copy
    elif isinstance(part, dict):
        part.clear()
        part.update(zip(copy[: len(copy) // 2], copy[len(copy) // 2 :], strict=True))
    elif isinstance(part, deque):
        part.clear()
        part.extend(copy)
    elif isinstance(part, set):
        part.clear()
        part.update(copy)
    else:
        for slot, value in zip(_slots(part), copy, strict=True):
            if value is not _ABSENT:
                slot.__set__(part, value)
            elif hasattr(part, slot.__name__):
                slot.__delete__(part)
    return True


def _tensor_has_back(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    try:
        if tensor.shape != copy.shape:  # it was resized, and a copy into it would be spread over the new shape
            return False
        try:
            with torch.no_grad():
                tensor.copy_(copy)
        except RuntimeError:  # it cannot be written (an expanded view, say): right if nobody did
            return torch.equal(tensor, copy)
    except RuntimeError:  # nor compared (a sparse one)
        return False
    return True


def _held(value: Any) -> list[Any]:
    """The contents of a container, or of an object's slots; a dictionary's keys come first."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (*_CONTAINERS, tuple, frozenset)):
        return list(value)
    return [getattr(value, slot.__name__, _ABSENT) for slot in _slots(value)]


def _slots(value: Any) -> list[types.MemberDescriptorType]:
    if isinstance(value, (*_CONTAINERS, tuple, frozenset)) or not _is_open(value):
        return []
    return _members(type(value))


def _members(kind: type) -> list[types.MemberDescriptorType]:
    """The slots of a class; a member that C declared may be a pointer to what nobody sees."""
    return [
        member
        for base in kind.__mro__
        if base.__flags__ & _MADE_BY_A_STATEMENT
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _is_open(value: Any) -> bool:
    """Whether an object holds nothing but attributes: it is no larger than those need."""
    kind = type(value)
    words = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0) + len(_members(kind))
    return bool(kind.__basicsize__ <= object.__basicsize__ + words * _POINTER)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic | numpy.dtype)
