"""Copy everything that an implementation may write, and restore it before another implementation runs.

An undeclared operator may write whatever its arguments reach: tensors, arrays, containers, attributes of objects. An
object that cannot be copied, such as a generator, cannot be restored, so the failure is raised.
"""

from __future__ import annotations

import enum
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..weight_forms import Forms

MOST_THINGS = 10_000  # an argument that reaches more objects reaches the whole program, which is not worth a copy
_CONTAINERS = (list, deque, dict, set, bytearray)
_SEQUENCES: tuple[Any, ...] = (list, deque, set, bytearray, tuple, frozenset)
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
    Forms,
)
_POINTER = tuple.__itemsize__
_MADE_BY_A_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_ABSENT = object()


def _gradient(tensor: torch.Tensor) -> Any:
    if not tensor.is_leaf:  # a non-leaf tensor has no gradient, and warns when it is read
        raise AttributeError("grad")
    return tensor.grad


_GRADIENT: Any = property(_gradient, lambda tensor, value: setattr(tensor, "grad", value), lambda tensor: None)
"""A tensor's gradient as a slot."""


def mutable_parts(values: Iterable[Any]) -> list[Any]:
    """Return every mutable object that values reach, also through tensors; a tensor as often as it is reached."""
    parts: list[Any] = []
    known: dict[int, Any] = {}  # keeps the objects alive, because an id is reused once its object is gone
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            parts.append(value)
        elif isinstance(value, _IMMUTABLE) or _is_scalar(value):
            continue
        if id(value) in known:
            continue
        known[id(value)] = value
        if len(known) > MOST_THINGS:
            return [*parts, iter(())]  # it cannot be copied
        if not isinstance(value, torch.Tensor | tuple | frozenset) and (_slots(value) or not _is_open(value)):
            parts.append(value)
        pending += _held(value)
        if hasattr(value, "__dict__"):
            pending.append(vars(value))
    return parts


def copies_of(parts: Iterable[Any]) -> list[Any] | None:
    """Return a copy of each part; ``None`` if one cannot be copied."""
    copies: list[Any] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            try:
                with torch.no_grad():
                    copies.append((part.clone(), _place(part), _held(part)))
            except RuntimeError:  # for example because the copy does not fit into memory
                return None
        elif _is_array(part) and not part.dtype.hasobject:
            copies.append(_plain(part).copy())
        elif isinstance(part, _CONTAINERS) or _is_open(part):
            copies.append(_held(part))
        else:
            return None
    return copies


def put_back(parts: Sequence[Any], copies: Sequence[Any] | None) -> bool:
    """Restore the old values of parts; return whether all succeeded."""
    if copies is None:
        return not parts
    return all(_restore(part, copy) for part, copy in zip(parts, copies, strict=True))


def _restore(part: Any, copy: Any) -> bool:
    """Restore a part; return whether it has its old value."""
    if isinstance(part, torch.Tensor):
        values, place, held = copy
        return _place(part) == place and _restore_tensor(part, values) and _restore_contents(part, held)
    if _is_array(part):
        array = _plain(part)
        if (array.shape, array.dtype) != (copy.shape, copy.dtype):
            return False
        if array.flags.writeable:
            array[...] = copy
        return bool(array.tobytes() == copy.tobytes())
    return _restore_contents(part, copy)


def _restore_contents(part: Any, copy: list[Any]) -> bool:
    """Restore what an object held with the methods of Python's own class, because a subclass may redefine them."""
    held = _held(part)
    if len(held) == len(copy) and all(map(operator.is_, held, copy)):
        return True  # other threads may be reading it, so an unchanged object is not touched
    kind, slots = type(part), _slots(part)
    if kind is not copy[0]:
        return False
    attributes, contents = copy[1 : len(slots) + 1], copy[len(slots) + 1 :]
    if isinstance(part, list):
        list.__setitem__(part, slice(None), contents)
    elif isinstance(part, bytearray):
        try:
            bytearray.__setitem__(part, slice(None), bytes(contents))
        except BufferError:  # a reader has exported its buffer, so its length must stay
            return False
    elif isinstance(part, dict):
        base = _class_of_dictionary(part)
        base.clear(part)
        for key, value in zip(contents[: len(contents) // 2], contents[len(contents) // 2 :], strict=True):
            base.__setitem__(part, key, value)
    elif isinstance(part, deque):
        deque.clear(part)
        deque.extend(part, contents)
    elif isinstance(part, set):
        set.clear(part)
        set.update(part, contents)
    for slot, value in zip(slots, attributes, strict=True):
        if value is not _ABSENT:
            slot.__set__(part, value)
        elif _value(slot, part) is not _ABSENT:
            slot.__delete__(part)
    return True


def _restore_tensor(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Copy a tensor's values back; return whether it has them, although it may not be writable."""
    try:
        try:
            with torch.no_grad():
                tensor.copy_(copy)
        except RuntimeError:  # it cannot be written (an expanded view, for example): right if unchanged
            return torch.equal(tensor, copy)
    except RuntimeError:  # it cannot be compared either (a sparse tensor)
        return False
    return True


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape and memory: values restored into other memory would miss the tensor's views."""
    try:
        return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no address
        return (tensor.shape,)


def _held(value: Any) -> list[Any]:
    """Return an object's class, its slots' values and a container's contents; a dictionary's keys come first."""
    attributes = [type(value), *(_value(slot, value) for slot in _slots(value))]
    if isinstance(value, dict):
        kind = _class_of_dictionary(value)
        return [*attributes, *kind.keys(value), *kind.values(value)]
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return [*attributes, *kind.__iter__(value)]
    return attributes


def _class_of_dictionary(value: dict[Any, Any]) -> Any:
    """Return Python's own base class of a dictionary: an ordered one keeps an order of its own."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _value(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _ABSENT


def _slots(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [*_members(type(value)), _GRADIENT]
    if isinstance(value, (*_SEQUENCES, dict)) or _is_open(value):
        return _members(type(value))
    return []


def _members(kind: type) -> list[types.MemberDescriptorType]:
    """Return the slots of a class; a member declared in C may be a pointer into memory that Python cannot see."""
    return [
        member
        for base in kind.__mro__
        if base.__flags__ & _MADE_BY_A_STATEMENT or base is defaultdict
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _is_open(value: Any) -> bool:
    """Whether an object holds only attributes, because it is no larger than they need."""
    kind = type(value)
    words = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0) + len(_members(kind))
    return bool(kind.__basicsize__ <= object.__basicsize__ + words * _POINTER)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _plain(array: Any) -> Any:
    """Return the array without its subclass, because a subclass may redefine methods (masked arrays do)."""
    return sys.modules["numpy"].ndarray.view(array, sys.modules["numpy"].ndarray)


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic | numpy.dtype)
