"""FlagCX, a communication library for many chips, through its C interface (``flagcx/include/flagcx.h``).

The collectives were run with a stand-in for the library, on host memory and on an emulated accelerator, but not with
FlagCX.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import native
from ...devices import device_of
from ...errors import ConfigError, NotSupported
from ...logger_manager import get_logger

logger = get_logger(__name__)

VARIABLE = "FLAGCX_PATH"
LIBRARY = "libflagcx.so"
FOLDERS = ("", "lib", "build/lib")
"""Paths of the library below a directory that the variable names: an installation or a source tree."""

UNIQUE_ID_BYTES = 256
SUM = 0  # flagcxSum
DTYPES = {  # flagcxDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class _Stream(ctypes.Structure):
    """A stream in the library's form: all its adaptors wrap their runtime's own handle, and nothing else."""

    _fields_ = [("base", c_void_p)]


_BUFFERS = (c_void_p, c_void_p, c_size_t, c_int)  # from, to, number of elements, data type
_WHERE = (c_void_p, c_void_p)  # communicator, stream

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "flagcxGetVersion": (POINTER(c_int),),
    "flagcxGetErrorString": (c_int,),
    "flagcxGetUniqueId": (POINTER(_UniqueId),),
    "flagcxCommInitRank": (POINTER(c_void_p), c_int, POINTER(_UniqueId), c_int),
    "flagcxCommDestroy": (c_void_p,),
    "flagcxAllReduce": (*_BUFFERS, c_int, *_WHERE),
    "flagcxAllGather": (*_BUFFERS, *_WHERE),
    "flagcxReduceScatter": (*_BUFFERS, c_int, *_WHERE),
    "flagcxBroadcast": (*_BUFFERS, c_int, *_WHERE),
    "flagcxSend": (c_void_p, c_size_t, c_int, c_int, *_WHERE),
    "flagcxRecv": (c_void_p, c_size_t, c_int, c_int, *_WHERE),
}
"""The functions of the library that are used, and the types of their parameters."""


@cache
def load(path: Path, device_type: str) -> ctypes.CDLL:
    """Load the library and check that it has every function of :data:`FUNCTIONS`.

    Args:
        path: the library, or a directory with it at one of :data:`FOLDERS`.
        device_type: the PyTorch device type of the tensors to move.

    Raises:
        ConfigError: the library is missing, does not load, or is not FlagCX; or the device's spec does not give the
            current stream.
    """

    def wrong(problem: str) -> ConfigError:
        advice = f"name a {LIBRARY} that was built for this device, or unset {VARIABLE} to use torch.distributed"
        return ConfigError(f"environment variable {VARIABLE}", str(path), f"{problem}; {advice}")

    if device_of(device_type).flagcx_stream is None:
        raise wrong(f"streams of device '{device_type}' cannot be handed to FlagCX yet")
    file = path
    if path.is_dir():
        file = next((path / folder / LIBRARY for folder in FOLDERS if (path / folder / LIBRARY).is_file()), path)
    if not file.is_file():
        raise wrong(f"no {LIBRARY} is there" if path.is_dir() else "there is no such file")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise wrong(f"the library does not load ({error})") from error
    missing = [name for name in FUNCTIONS if not hasattr(library, name)]
    if missing:
        raise wrong(f"the library is not FlagCX: it lacks {', '.join(missing)}")
    for name, parameters in FUNCTIONS.items():
        getattr(library, name).argtypes = parameters
        getattr(library, name).restype = c_int
    library.flagcxGetErrorString.restype = c_char_p
    version = c_int()
    code = library.flagcxGetVersion(byref(version))
    if code != 0:
        raise wrong(f"flagcxGetVersion failed with {code}")
    logger.info("communication runs through FlagCX, version code %d (%s)", version.value, file)
    return library


def connect(library: ctypes.CDLL, cpu_group: ProcessGroup, device_type: str) -> FlagCXCollectives:
    """Make FlagCX's communicator of a group. Every rank of the group must call it.

    Args:
        library: see :func:`load`.
        cpu_group: the ranks, for the rendezvous.
        device_type: the PyTorch device type of the tensors to move.
    """
    rank, ranks = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    of_first = [_unique_id(library) if rank == 0 else b""]
    dist.broadcast_object_list(of_first, src=dist.get_process_group_ranks(cpu_group)[0], group=cpu_group)
    unique_id, communicator = _UniqueId.from_buffer_copy(of_first[0]), c_void_p()
    code = library.flagcxCommInitRank(byref(communicator), ranks, byref(unique_id), rank)
    _check(library, "flagcxCommInitRank", code)
    return FlagCXCollectives(library, communicator, device_type, ranks)


def _unique_id(library: ctypes.CDLL) -> bytes:
    """Return a new id. Older libraries write a pointer to an id that they allocate, newer ones the id itself.

    A pointer leaves the rest of the buffer zero; an id holds the address of a socket after its first word.
    """
    buffer = _UniqueId()
    _check(library, "flagcxGetUniqueId", library.flagcxGetUniqueId(byref(buffer)))
    written = bytes(buffer)
    if any(written[ctypes.sizeof(c_void_p) :]):
        return written
    return bytes(ctypes.cast(byref(buffer), POINTER(POINTER(_UniqueId))).contents.contents)


def _check(library: ctypes.CDLL, function: str, code: int) -> None:
    if code != 0:
        text = library.flagcxGetErrorString(code) or b"no description"
        raise RuntimeError(f"{function} of FlagCX failed with {code}: {text.decode(errors='replace')}")


class FlagCXCollectives:
    """The collectives of one FlagCX communicator, over contiguous tensors, on the device's current stream.

    Every method raises :class:`NotSupported` before the library sees a tensor that it would read or write wrongly.
    """

    def __init__(self, library: ctypes.CDLL, communicator: c_void_p, device_type: str, ranks: int) -> None:
        self._library, self._communicator, self._device_type, self._ranks = library, communicator, device_type, ranks
        self._current_stream: Callable[[], int | None] = device_of(device_type).flagcx_stream or (lambda: None)
        self._streams: dict[int, _Stream] = {}  # kept, because threads of the library may read it later

    def all_reduce(self, tensor: Tensor) -> None:
        self._run("flagcxAllReduce", tensor, tensor, tensor.numel(), SUM)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self._require_parts(output, tensor)
        self._run("flagcxAllGather", tensor, output, tensor.numel())

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        self._require_parts(tensor, output)
        self._run("flagcxReduceScatter", tensor, output, output.numel(), SUM)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._run("flagcxBroadcast", tensor, tensor, tensor.numel(), source)

    def send(self, tensor: Tensor, target: int) -> None:
        self._call("flagcxSend", *self._places(tensor), tensor.numel(), _dtype(tensor), target)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._call("flagcxRecv", *self._places(tensor), tensor.numel(), _dtype(tensor), source)

    def close(self) -> None:
        """Free the communicator."""
        if self._communicator:
            _check(self._library, "flagcxCommDestroy", self._library.flagcxCommDestroy(self._communicator))
            self._communicator = c_void_p()

    def _run(self, function: str, source: Tensor, target: Tensor, count: int, *rest: int) -> None:
        self._call(function, *self._places(source, target), count, _dtype(source), *rest)

    def _places(self, *tensors: Tensor) -> list[int]:
        """Return the addresses of tensors that the library reads or writes.

        Raises:
            NotSupported: a tensor is on another device than the communicator, has gaps, or has no data (it is fake).
        """
        for tensor in tensors:
            same = _dtype(tensor) == _dtype(tensors[0])
            if not same or tensor.device.type != self._device_type or not tensor.is_contiguous():
                where = f"a {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
                raise NotSupported(f"FlagCX moves contiguous tensors of one dtype on {self._device_type}, not {where}")
        native.require_data(tensors)
        return [tensor.data_ptr() for tensor in tensors]

    def _require_parts(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self._ranks * part.numel():
            raise NotSupported(f"{whole.numel()} elements are not {self._ranks} ranks' parts of {part.numel()}")

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments, self._communicator, self._stream())
        _check(self._library, function, code)

    def _stream(self) -> int | None:
        """Return the address of the current stream in the library's form; ``None`` for host memory."""
        handle = self._current_stream()
        return None if handle is None else ctypes.addressof(self._streams.setdefault(handle, _Stream(handle)))


def _dtype(tensor: Tensor) -> int:
    if tensor.dtype not in DTYPES:
        raise NotImplementedError(f"FlagCX has no data type for {tensor.dtype}")
    return DTYPES[tensor.dtype]
