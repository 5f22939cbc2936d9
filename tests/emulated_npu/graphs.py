"""Graphs of the emulated NPU: operators that are recorded while one is captured, and run again when it is replayed.

The wheel's ``torch.npu.NPUGraph`` captures and replays through functions of the runtime. The emulated runtime tells
this module when a capture begins and ends, and when a graph is replayed or destroyed.

As on a chip a capture computes nothing that lasts: tensors that were there before keep their contents, and results hold
no numbers until the first replay. A replay reads and writes the memory of the capture, whatever was in it since, and
repeats every argument that is not a tensor. Unlike a chip's, a graph here keeps each of its tensors alive.
"""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .aten import alias

BEGIN, END, REPLAY, DESTROY = range(4)
"""Events that the runtime tells."""
OVERWRITING = {"npu::npu_apply_rotary_pos_emb": 2}
"""Operators that write their first arguments, and how many, though the schema does not say so."""

_graphs: dict[int, Graph] = {}
_counts: Counter[str] = Counter()
_capturing: Graph | None = None


class Graph:
    """The operators of one capture."""

    def __init__(self) -> None:
        self._records: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(self, schema: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator so that its results are there, and note it."""
        for tensor in _written(schema, args, kwargs):
            place = tensor.untyped_storage().data_ptr()
            if place not in self._made and place not in self._before:
                self._before[place] = (tensor, _bytes(tensor).clone())
        args, kwargs = _kept(args), {name: _kept(value) for name, value in kwargs.items()}
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, list(kwargs.values())))}
        results = run(*args, **kwargs)
        for tensor in _tensors(results):
            if tensor.untyped_storage().data_ptr() not in given:
                self._made[tensor.untyped_storage().data_ptr()] = tensor
        self._records.append((run, args, kwargs, results))
        return results

    def end(self) -> None:
        """Undo the run: on a chip nothing was computed."""
        for tensor in self._made.values():
            alias(tensor).fill_(torch.nan if tensor.is_floating_point() else 1)
        for tensor, contents in self._before.values():
            _bytes(tensor).copy_(contents)
        self._before.clear()

    def replay(self) -> None:
        """Run the operators in their order, each into the memory of its recorded results."""
        for run, args, kwargs, results in self._records:
            for recorded, made in zip(_tensors(results), _tensors(run(*args, **kwargs)), strict=True):
                if recorded.data_ptr() != made.data_ptr():
                    alias(recorded).copy_(alias(made))


def graph_counts() -> dict[str, int]:
    """The number of graphs that this process ``captured``, and of times that it ``replayed`` one."""
    return {name: _counts[name] for name in ("captured", "replayed")}


def captured_now() -> Graph | None:
    """The graph that is being captured in this process."""
    return _capturing


def refuse_to_record(what: str) -> None:
    """Raise if a graph is being captured, which would lack it."""
    if _capturing is not None:
        raise RuntimeError(f"the emulated NPU refuses {what} while a graph is captured: nobody records it")


def _kept(value: Any) -> Any:
    """An argument as it is now: a caller may change its list later."""
    return type(value)(map(_kept, value)) if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "npu":
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    values = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
    for place, (argument, value) in enumerate(zip(schema.arguments, values, strict=True)):
        if (argument.alias_info and argument.alias_info.is_write) or place < OVERWRITING.get(schema.name, 0):
            yield from _tensors(value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's memory, on the CPU."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=torch.uint8).set_(memory)


def _told(event: int, graph: int) -> int:
    """The runtime's message; returns 0, or 1 where something failed."""
    try:
        _follow(event, graph)
    except BaseException:  # whatever it is: C takes a code alone, and an exception would leave it an arbitrary one
        traceback.print_exc()
        return 1
    return 0


def _follow(event: int, graph: int) -> None:
    global _capturing
    if event == BEGIN:
        _capturing = _graphs[graph] = Graph()
    elif event == END:
        ended, _capturing = _graphs[graph], None
        ended.end()
        _counts["captured"] += 1
    elif event == DESTROY:
        _graphs.pop(graph, None)
    else:
        _graphs[graph].replay()
        _counts["replayed"] += 1


_TOLD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(_told)


def install() -> None:
    """Let the runtime tell this module; its library is loaded already."""
    ctypes.CDLL("libascendcl.so").emulated_tell_graphs(_TOLD)
