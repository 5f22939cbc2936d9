"""Account for a checkpoint's tensors while a host loads them: the parameters that they fill, and leftover tensors.

Hosts drop tensors with unknown names, leave parameters without tensors unfilled, and cast tensors silently. So
:class:`Account` follows the data: a dispatch mode sees each ATen operator that runs while weights load, and knows from
the storages which tensor of the file each value comes from. Loaders may rename, slice, transpose, dequantize or join
tensors in any way, however they write.

The alternatives see less. A parameter's ``_version`` does not count writes through ``.data``, as both hosts write, and
does not say which part was written. A sentinel, written before and searched afterwards, touches all memory twice; any
pattern of 8-bit weights may be real, and a sentinel does not show dropped tensors. Calls of ``weight_loader`` miss
loaders that write directly, and do not show the parts of a joined parameter.

The cost is some Python for each operator, independent of a tensor's size.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from . import files
from .allowed import CACHE_SCALES, ORDER, PART, ZEROS, Allowed, matching
from .filled import Place
from .origins import NOTHING, Origin, Storage, key
from .watching import Kind, Named, unwatched, watching


class Cast(NamedTuple):
    """A tensor with values that were cast to another type in a parameter."""

    name: str
    stored: torch.dtype
    parameter: str
    dtype: torch.dtype


class Unfilled(NamedTuple):
    """A parameter or buffer that the checkpoint does not fill; ``names``: the tensors that filled a part."""

    name: str
    names: list[str]


class Account:
    """The account of one load.

    Args:
        model: the model after its constructor.
        source: the checkpoint's folder, or its name in a hub.
        quantized: whether the configuration says that the checkpoint is quantized.
    """

    def __init__(self, model: nn.Module, source: str, quantized: bool = False) -> None:
        self.source, self.quantized = source, quantized
        self.files: list[str] = []
        self._file_of: dict[str, str] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.taken: set[str] = set()
        """Names of tensors that became a Python number, became a parameter, or were kept by a loader."""
        self.dropped: set[str] = set()
        """Names that the host's class of the model declares unused."""
        self.casts: list[Cast] = []
        self.last: str | None = None
        self._storages: dict[int, Storage] = {}
        self._places: dict[int, list[Place]] = {}
        self._kept: list[StorageWeakRef] = []
        self._scalar = NOTHING
        self._lock = threading.RLock()
        for name, tensor in _named(model):
            self._kept.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
            self._places.setdefault(key(tensor), []).append(Place(name, tensor))

    # -- while weights load -------------------------------------------------------------------------------------------

    def see(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors with their names, and record them."""
        for name, tensor in unwatched(weights):
            with self._lock:
                self.last, self._scalar = name, NOTHING
                self.tensors[name] = tensor.dtype, tuple(tensor.shape)
                self._storage(tensor).put(name, tensor)
            yield name, tensor
        self.last = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the operators of this thread, and of threads to which it hands work meanwhile."""
        with watching(self._ran):
            yield
        for storage in self._storages.values():
            self.taken |= storage.made()

    def _storage(self, tensor: Tensor) -> Storage:
        """Return the record of a tensor's storage, which the first call makes."""
        found = self._storages.get(key(tensor))
        if found is None:
            found = self._storages[key(tensor)] = Storage(tensor.untyped_storage())
        return found

    def _ran(self, kind: Kind, args: Any, kwargs: Any, result: Any) -> None:
        """Record where the result of an operator that ran, and what it wrote, came from."""
        with self._lock:
            written = [args[index] for index in kind.positions if index < len(args)]
            written += [kwargs[name] for name in kind.names if name in kwargs]
            origin = self._origin(kind, args, kwargs)
            if not kind.positions and not origin.names:
                return
            if isinstance(result, int | float):
                self._scalar = origin
                if not isinstance(result, bool):  # a loader inspects values with these
                    self.taken |= origin.names
            elif not written:
                for tensor in _tensors(result if isinstance(result, list | tuple) else (result,)):
                    self._make(tensor, origin)
            for tensor in _tensors(written):
                self._write(tensor, origin)

    def _origin(self, kind: Kind, args: Any, kwargs: Any) -> Origin:
        """Return the origin of an operator's operands together; parameters have none."""
        found = [
            origin
            for tensor in _tensors((*args, *kwargs.values()))
            if (storage := self._storages.get(key(tensor))) is not None
            and (origin := storage.origin(tensor)).names
            and key(tensor) not in self._places
        ]
        if not found:
            return NOTHING
        if len(found) == 1:
            return found[0] if kind.casts else Origin(found[0].names)
        return Origin(frozenset[str]().union(*(origin.names for origin in found)))

    def _make(self, tensor: Tensor, origin: Origin) -> None:
        """Record the origin of a new tensor."""
        if key(tensor) not in self._places:
            self._storage(tensor).whole = origin

    def _write(self, tensor: Tensor, origin: Origin) -> None:
        """Record the origin of what an operator wrote into a tensor."""
        places = self._places.get(key(tensor))
        if places is None:
            if origin.names:
                storage = self._storages.get(key(tensor))
                whole = NOTHING if storage is None else storage.whole
                self._make(tensor, Origin(whole.names | origin.names))
            return
        if not origin.names and tensor.numel() == 1:
            origin, self._scalar = self._scalar, NOTHING
        for place in places:
            place.write(tensor, origin.names)
            if origin.dtype is not None and _number(origin.dtype) != _number(tensor.dtype):
                self.casts.append(Cast(min(origin.names), origin.dtype, place.name, tensor.dtype))

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def unfilled(self, model: nn.Module, allowed: Sequence[Allowed]) -> list[Unfilled]:
        """Return the model's parameters that no tensor filled, and parameters and buffers that tensors filled in part.

        A buffer that no tensor fills keeps its constructor's value, such as a factor from config.json.
        """
        found = []
        for name, tensor in _named(model):
            if not tensor.numel() or tensor.is_meta:
                continue
            rules = matching(name, allowed)
            excused = not isinstance(tensor, nn.Parameter) or any(rule.equal != PART for rule in rules)
            places = [place for place in self._places.get(key(tensor), ()) if place.offset == tensor.storage_offset()]
            if places:
                names = set[str]().union(*(place.names for place in places))
                in_part = bool(names) and any(rule.equal == PART for rule in rules)
                if (not names and excused) or in_part or self._is_joined_scale(name, names):
                    continue
                if not any(place.names and place.is_whole() for place in places):
                    found.append(Unfilled(name, sorted(names)))
                continue
            storage = self._storages.get(key(tensor))
            origin = NOTHING if storage is None else storage.origin(tensor)
            self.taken |= origin.names  # the parameter is the file's tensor, or was made from it
            if not origin.names and not excused:
                found.append(Unfilled(name, []))
        return found

    def _is_joined_scale(self, name: str, names: set[str]) -> bool:
        """Whether a checkpoint has one number for layers that it joined, which a host's loader writes once."""
        return len(names) == 1 and all(
            name.split(".")[-2:] == other.split(".")[-2:] and math.prod(self.tensors[other][1]) == 1 for other in names
        )

    def left(self, allowed: Sequence[Allowed]) -> list[str]:
        """Return the tensors from which no parameter took values, and that may not be left over."""
        places = [place for each in self._places.values() for place in each]
        if not any(place.name.endswith(".k_scale") for place in places):
            allowed = (*allowed, *CACHE_SCALES)
        taken = self.taken.union(self.dropped, *(place.names for place in places))
        found = [name for name in self.tensors if name not in taken]
        return [name for name in found if not any(self._holds(name, rule) for rule in matching(name, allowed))]

    def _holds(self, name: str, rule: Allowed) -> bool:
        """Whether a tensor that may be left over has the required values, if a safetensors file has it."""
        if not rule.equal or not (file := self.file_of(name)):
            return True
        values = files.read(file, name)
        if rule.equal == ORDER:
            return bool((values.diff() >= 0).all())
        if rule.equal == ZEROS:
            return not values.any()
        others = (other for other in self.tensors if re.fullmatch(rule.equal, other))
        return any(torch.equal(values, files.read(self.file_of(other), other)) for other in others)

    def file_of(self, name: str) -> str:
        """Return the safetensors file with a tensor; empty if it is unknown."""
        if not self._file_of:
            self._file_of = files.files_by_name(self.files)
        return self._file_of.get(name, "")

    def is_quantized(self) -> bool:
        """Whether the configuration says that the checkpoint is quantized, or tensors have packed or 8-bit numbers."""
        return self.quantized or any(dtype in _QUANTIZED for dtype, _ in self.tensors.values())


_QUANTIZED = {torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, and the buffers that a checkpoint of the model would have."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _number(dtype: torch.dtype) -> str:
    """Return the kind of numbers of a dtype; a cast within a kind changes at most the precision."""
    if dtype.itemsize == 1:
        # float8_e8m0fnu has only powers of two, which every wider type can represent.
        return "floating point" if dtype is torch.float8_e8m0fnu else str(dtype)
    return "floating point" if dtype.is_floating_point else "integer" if not dtype.is_complex else "complex"
