"""Attacks on "the next one runs on the original values": an undeclared operator writes what its arguments reach."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    "attribute of a tensor": lambda x: carrying(torch.zeros(2), x),
    "list in an attribute of a tensor": lambda x: carrying(torch.zeros(2), [x]),
    "attribute of a tensor in a list": lambda x: [carrying(torch.nn.Parameter(torch.zeros(2)), x)],
    "tensor that carries itself": lambda x: carrying(x, x),
    "gradient": lambda x: with_gradient(torch.zeros(2), x),
    "attribute of a gradient": lambda x: with_gradient(torch.zeros(2), carrying(torch.zeros(2), x)),
    "attribute of a view": lambda x: carrying(torch.zeros(4)[:2], x),
    "tensor of a class of its own": lambda x: carrying(torch.zeros(2).as_subclass(Scaled), x),
    "slot of a list": lambda x: SlottedList([], x),
}


class Scaled(Tensor):
    pass


class SlottedList(list[Any]):
    __slots__ = ("carried",)

    def __init__(self, items: list[Any], carried: Any) -> None:
        super().__init__(items)
        self.carried = carried


def carrying(tensor: Tensor, carried: Any) -> Tensor:
    """The tensor, with an attribute as hosts hang scales there."""
    tensor.carried = carried  # type: ignore[attr-defined]
    return tensor


def with_gradient(tensor: Tensor, gradient: Tensor) -> Tensor:
    tensor.grad = gradient
    return tensor


def held_by(holder: Any) -> Tensor:
    """The tensor that one of ``HOLDERS`` made a holder of."""
    while not isinstance(holder, Tensor) or hasattr(holder, "carried") or holder.grad is not None:
        if hasattr(holder, "carried"):
            if holder.carried is holder:
                return holder
            holder = holder.carried
            continue
        if isinstance(holder, Tensor):
            assert holder.grad is not None
            holder = holder.grad
            continue
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


class OwnUpdate(dict[Any, Any]):
    """A dictionary whose methods mean something else, as a counter's do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update({key: 2 * value for key, value in dict(*args, **kwargs).items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, (value, value))

    def clear(self) -> None:
        """Keeps everything."""

    def keys(self) -> Any:
        return {"none": 0}.keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class OwnList(list[Any]):
    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, [value, value])

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class OwnSet(set[Any]):
    def update(self, *others: Any) -> None:
        super().update(*([(item, item) for item in other] for other in others))

    def clear(self) -> None:
        """Keeps everything."""


class OwnDeque(deque[Any]):
    def extend(self, items: Any) -> None:
        super().extend([item, item] for item in items)


class OwnArray(numpy.ndarray):
    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, 7)


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
    "counter": (Counter(a=3, b=1), lambda holder: holder.subtract("aab")),
    "ordered dictionary": (OrderedDict(a=1, b=2), lambda holder: holder.move_to_end("a")),
    "ordered dictionary without a key": (OrderedDict(a=1, b=2), lambda holder: holder.popitem()),
    "dictionary with a factory": (defaultdict(list, a=1), lambda holder: setattr(holder, "default_factory", int)),
    "dictionary of a class of its own": (OwnUpdate(a=1), dict.clear),
    "list of a class of its own": (OwnList([1, 2]), lambda holder: holder.reverse()),
    "set of a class of its own": (OwnSet({1}), lambda holder: holder.add(2)),
    "deque of a class of its own": (OwnDeque([1]), lambda holder: holder.append(2)),
    "array of a class of its own": (numpy.ones(2).view(OwnArray), lambda holder: holder.fill(3)),
    "slot of a list": (SlottedList([1], 1), lambda holder: holder.__init__([2], 2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_an_undeclared_operator_replaced_inside_an_argument_is_back_in_its_place(kind: str) -> None:
    holder, change = CHANGES[kind]
    before = described(holder)

    def breaks(holder: Any) -> Any:
        change(holder)
        assert described(holder) != before
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", described))
    assert manager.call("demo", holder) == before


# -- whatever the argument is made of ---------------------------------------------------------------------------------


def inside(value: Any) -> list[Any]:
    """The things that a thing holds, asked by Python's own methods, and not by those of the code under test."""
    held: list[Any] = []
    if isinstance(value, OrderedDict):
        held = [thing for pair in OrderedDict.items(value) for thing in pair]
    elif isinstance(value, dict):
        held = [thing for pair in dict.items(value) for thing in pair]
    elif isinstance(value, set):
        held = sorted(set.__iter__(value), key=id)
    elif isinstance(value, list | tuple | deque | bytearray):
        base = next(kind for kind in (list, tuple, deque, bytearray) if isinstance(value, kind))
        held = [*base.__iter__(value)]
    elif isinstance(value, Tensor) and value.is_leaf and value.grad is not None:
        held = ["grad", value.grad]
    if isinstance(value, defaultdict):
        held.append(value.default_factory)
    for name in (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())):
        held += [name, getattr(value, name, "none")]
    if isinstance(value, Tensor | torch.nn.Module | types.SimpleNamespace | Record | dict | list):
        held += [thing for pair in getattr(value, "__dict__", {}).items() for thing in pair]
    return held


def described(value: Any, seen: dict[int, int] | None = None) -> Any:
    """The nature of a thing, down to the numbers of tensors and which things are the same one."""
    seen = {} if seen is None else seen
    if isinstance(value, int | str | type | types.FunctionType | types.NoneType):
        return repr(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    numbers: Any = None
    if isinstance(value, Tensor):
        numbers = value.detach().as_subclass(Tensor).tolist()
    elif isinstance(value, numpy.ndarray):
        numbers = value.tolist()
    return type(value).__name__, id(value), numbers, tuple(described(thing, seen) for thing in inside(value))


class Slots:
    __slots__ = ("one", "two")

    def __init__(self, one: Any) -> None:
        self.one = one


LEAVES = st.one_of(
    st.integers(0, 3),
    st.text("ab", max_size=2),
    st.builds(lambda values: torch.tensor(values, dtype=torch.float32), st.lists(st.integers(0, 3), max_size=3)),
    st.builds(lambda: torch.nn.Parameter(torch.ones(2))),
    st.builds(lambda: numpy.arange(3)),
    st.builds(lambda size: bytearray(range(size)), st.integers(0, 3)),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    tables = st.dictionaries(st.text("abc", max_size=1), inner, max_size=3)
    return st.one_of(
        *(st.builds(kind, lists) for kind in (list, tuple, deque, OwnList, OwnDeque)),
        *(st.builds(kind, tables) for kind in (dict, OrderedDict, OwnUpdate, lambda table: defaultdict(list, table))),
        st.builds(lambda items: OwnSet(map(id, items)), lists),
        st.builds(Counter, st.dictionaries(st.text("ab", max_size=1), st.integers(1, 3))),
        st.builds(Record, inner),
        st.builds(Slots, inner),
        st.builds(SlottedList, lists, inner),
        st.builds(lambda held: carrying(torch.ones(2), held), inner),
        st.builds(lambda held: with_gradient(torch.zeros(2), carrying(torch.ones(2), held)), inner),
        st.builds(lambda held: carrying(torch.ones(2).as_subclass(Scaled), held), inner),
    )


def spoil(value: Any, choose: Callable[[int], int]) -> None:
    """Write something else into a thing, and into all that it holds."""
    todo, seen = [value], {id(value): value}
    while todo:
        thing = todo.pop()
        for held in inside(thing):
            if id(held) not in seen and not isinstance(held, int | str | type | types.NoneType):
                seen[id(held)] = held
                todo.append(held)
        if not choose(3):
            continue  # some stay as they are
        if isinstance(thing, dict):
            base = OrderedDict if isinstance(thing, OrderedDict) else dict
            base.clear(thing) if choose(2) else base.__setitem__(thing, "new", 1)
        elif isinstance(thing, list):
            list.clear(thing) if choose(2) else list.append(thing, "new")
        elif isinstance(thing, set):
            set.clear(thing) if choose(2) else set.add(thing, "new")
        elif isinstance(thing, deque):
            deque.clear(thing) if choose(2) else deque.append(thing, "new")
        elif isinstance(thing, bytearray):
            thing.append(1)
        elif isinstance(thing, numpy.ndarray):
            thing.fill(9)
        elif isinstance(thing, Tensor):
            with torch.no_grad():
                thing.fill_(9)
            if choose(2):
                thing.grad = None
            vars(thing).clear() if choose(2) else setattr(thing, "new", 1)
        elif isinstance(thing, Slots):
            thing.two = 2
            del thing.one
        elif isinstance(thing, Record):
            thing.x = torch.zeros(1)


@settings(max_examples=200, deadline=None)
@given(holder=st.recursive(LEAVES, grown, max_leaves=8), data=st.data())
def test_whatever_an_argument_is_made_of_is_as_it_was_after_a_fallback(holder: Any, data: st.DataObject) -> None:
    before = described(holder)

    def breaks(holder: Any) -> Any:
        spoil(holder, lambda choices: data.draw(st.integers(0, choices - 1)))
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", described))
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


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "into other memory": lambda x: setattr(x, "data", torch.zeros(2, 2)),
    "into other strides": lambda x: x.t_(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_tensor_that_was_moved_is_never_retried(move: Callable[[Tensor], Any]) -> None:
    """Values that are put back there would miss the views that the caller has."""

    def breaks(x: Tensor) -> Any:
        move(x)
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda x: x))
    with pytest.raises(RuntimeError, match="half-way"):
        manager.call("demo", torch.ones(2, 2))


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
