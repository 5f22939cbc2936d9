"""A call of an operator on the emulated NPU: counted where the host waits, recorded while a graph is captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from . import graphs

SHAPED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operators whose result has a shape that only the device knows."""
READ = {"_local_scalar_dense", "equal"}
"""Operators whose result is a number of the host."""
INDEXING = {"index", "index_put_", "_index_put_impl_"}
"""Operators whose indices may be masks; a mask is searched for its elements first."""
COPIES = {"copy_": (0, 1), "_copy_from": (1, 0)}
"""Operators that copy: the places of the destination and of the source."""

_waits: Counter[str] = Counter()


def waits() -> dict[str, int]:
    """Operator → calls in this process for which the host waited for the device."""
    return dict(_waits)


def reset_waits() -> None:
    _waits.clear()


def launch(
    operator: torch._ops.OpOverload, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator's kernel.

    Raises:
        RuntimeError: a graph is being captured, and the host would wait for what does not run yet.
    """
    name = operator._schema.name.rpartition("::")[2]
    graph = graphs.captured_now()
    if does_wait(name, args, kwargs):
        if graph is not None:
            raise RuntimeError(f"the emulated NPU refuses {name} while a graph is captured: the host waits for it")
        _waits[name] += 1
    return run(*args, **kwargs) if graph is None else graph.record(operator._schema, run, args, kwargs)


def does_wait(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host goes on only when the device has computed a value, a shape, or a copy to the host."""
    if name in SHAPED_BY_VALUES | READ:
        return True
    if name in INDEXING:
        return any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in args[1])
    if name == "repeat_interleave":  # by a tensor of numbers, whose sum is the size
        return kwargs.get("output_size") is None and all(isinstance(value, torch.Tensor) for value in args[:2])
    if name == "_to_copy":
        to = kwargs.get("device")
        return not kwargs.get("non_blocking") and to is not None and torch.device(to).type == "cpu"
    if name in COPIES:
        target, source = (args[place] for place in COPIES[name])
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return blocking and target.device.type == "cpu" and source.device.type == "npu"
    return False
