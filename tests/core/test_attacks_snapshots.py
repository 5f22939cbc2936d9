"""Attacks on "the next one runs on the original values": an undeclared operator writes what its arguments reach."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from builders import impl, manager_of

pytestmark = pytest.mark.usefixtures("results_are_names")

Tensor = torch.Tensor


@dataclasses.dataclass
class Record:
    x: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Item(NamedTuple):
    x: Tensor


class Layer(torch.nn.Module):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("x", x)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Record,
    "frozen dataclass with slots": Slotted,
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "named tuple": Item,
    "layer": Layer,
    "layer in a layer": lambda x: torch.nn.ModuleDict({"x": torch.nn.ParameterList([x])})["x"],
    "deque": lambda x: deque([x]),
    "set in a list": lambda x: [{x}],
    "object in a dictionary": lambda x: {"layer": Record(x)},
    "ring": lambda x: (ring := [x]).append(ring) or ring,
    "NumPy array": lambda x: x.numpy(),
}


def held_by(holder: Any) -> Tensor:
    """The tensor that one of ``HOLDERS`` made a holder of."""
    while not isinstance(holder, Tensor):
        if isinstance(holder, numpy.ndarray):
            return torch.from_numpy(holder)
        if isinstance(holder, dict):
            holder = holder["layer"]
        else:
            holder = holder.x if hasattr(holder, "x") else next(iter(holder))
    return holder


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_an_undeclared_operator_wrote_inside_an_argument_is_restored(kind: str) -> None:
    def breaks(holder: Any) -> Any:
        with torch.no_grad():
            held_by(holder).fill_(-1)
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda holder: held_by(holder) * 2))
    assert manager.call("demo", HOLDERS[kind](torch.ones(2))).eq(2).all()


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list": ([1, 2], lambda holder: holder.reverse()),
    "dictionary": ({"x": 1, "y": 2}, lambda holder: holder.pop("x")),
    "deque": (deque([1], maxlen=1), lambda holder: holder.append(2)),
    "set": ({1, 2}, lambda holder: holder.add(3)),
    "bytes": (bytearray(b"1"), lambda holder: holder.append(2)),
    "new attribute": (types.SimpleNamespace(x=1), lambda holder: setattr(holder, "y", 2)),
    "deleted attribute": (types.SimpleNamespace(x=1), lambda holder: delattr(holder, "x")),
    "slot": (Slotted(1), lambda holder: object.__setattr__(holder, "x", 2)),
    "layer": (torch.nn.Sequential(torch.nn.ReLU()), lambda holder: holder.append(torch.nn.GELU())),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_an_undeclared_operator_replaced_inside_an_argument_is_back_in_its_place(kind: str) -> None:
    holder, change = CHANGES[kind]
    before = repr(holder)

    def breaks(holder: Any) -> Any:
        change(holder)
        assert repr(holder) != before
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", repr, signature="unchecked"))
    assert manager.call("demo", holder) == before


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], Record], ids=["bare", "in a list", "in an object"])
def test_what_cannot_be_copied_is_never_retried(wrap: Any) -> None:
    def breaks(numbers: Any) -> Any:
        inside = numbers.x if isinstance(numbers, Record) else numbers[0] if isinstance(numbers, list) else numbers
        next(inside)
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda numbers: "retried"))
    with pytest.raises(RuntimeError, match="half-way"):
        manager.call("demo", wrap(number for number in range(3)))
    assert manager.get_failed_impls() == {}


def test_a_tensor_that_was_resized_is_never_retried() -> None:
    def breaks(x: Tensor) -> Any:
        x.resize_(3, 2)
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda x: x.shape))
    with pytest.raises(RuntimeError, match="half-way"):
        manager.call("demo", torch.ones(2))


def test_once_proven_a_failure_that_may_have_written_inside_an_argument_is_raised() -> None:
    outcomes = iter([None, RuntimeError("half-way")])

    def first(record: Record) -> Any:
        error = next(outcomes)
        if error:
            record.x.fill_(-1)
            raise error
        return "first"

    manager = manager_of(impl("default.a", first), impl("reference.b", lambda record: "retried"))
    assert manager.call("demo", Record(torch.ones(2))) == "first"
    with pytest.raises(RuntimeError, match="half-way"):
        manager.call("demo", Record(torch.ones(2)))
