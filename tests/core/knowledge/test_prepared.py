"""Prepared weights: a form is made once, follows every write, and is no part of a copy."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fl_dispatch
from fl_dispatch import weight_forms

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(2.0),
    "through .data, as a loader writes": lambda weight: weight.data.narrow(0, 1, 1).copy_(torch.ones(1, 4)),
    "through a view": lambda weight: weight.data[2:].fill_(7.0),
    "through NumPy": lambda weight: weight.data.numpy().__setitem__((0, 0), 5.0),
    "by new memory": lambda weight: setattr(weight, "data", torch.full((3, 4), 9.0)),
}


class Maker:
    """Counts what it makes: copies of weights."""

    def __init__(self) -> None:
        self.befores: list[Tensor | None] = []

    def __call__(self, weight: Tensor, before: Tensor | None) -> Tensor:
        self.befores.append(before)
        return weight.clone()


def form(weight: Tensor, name: str, make: Maker) -> Tensor:
    """The form, which there must be."""
    found = weight_forms.of(weight, name, make)
    assert found is not None
    return found


@pytest.fixture
def weight() -> Tensor:
    made = torch.nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)
    weight_forms.declare(made)
    return made


def test_a_form_is_made_in_the_first_call_and_kept(weight: Tensor) -> None:
    make = Maker()
    first = weight_forms.of(weight, "a", make)
    assert first is not None
    assert weight_forms.of(weight, "a", make) is first
    assert make.befores == [None]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_form_follows_a_write_whoever_writes(weight: Tensor, write: Callable[[Tensor], object]) -> None:
    make = Maker()
    before = weight_forms.of(weight, "a", make)
    write(weight)
    after = weight_forms.of(weight, "a", make)
    assert after is not None
    assert torch.equal(after, weight)
    assert len(make.befores) == 2
    assert make.befores[1] is before
    write(weight)
    assert torch.equal(form(weight, "a", make), weight)


def test_each_implementation_has_a_form_of_its_own_and_all_follow(weight: Tensor) -> None:
    makers = {"a": Maker(), "b": Maker()}
    for name, make in makers.items():
        weight_forms.of(weight, name, make)
    weight.data.mul_(3.0)
    for name, make in makers.items():
        assert torch.equal(form(weight, name, make), weight)
        assert len(make.befores) == 2


def test_reading_is_no_write(weight: Tensor) -> None:
    make = Maker()
    weight_forms.of(weight, "a", make)
    torch.nn.functional.linear(torch.ones(2, 4), weight)
    torch.nn.functional.embedding(torch.tensor([1]), weight)
    _ = weight.sum(), weight.t().contiguous(), weight.data.clone(), weight.tolist()
    weight_forms.of(weight, "a", make)
    assert len(make.befores) == 1


def test_a_maker_that_asks_for_memory_to_write_to_is_no_write(weight: Tensor) -> None:
    calls = []

    def make(now: Tensor, before: Tensor | None) -> Tensor:
        calls.append(now.data_ptr())  # as a kernel reads that does not say that it only reads
        return now

    for _ in range(3):
        weight_forms.of(weight, "a", make)
    assert len(calls) == 1


def test_a_weight_that_nobody_declared_has_no_form() -> None:
    make = Maker()
    assert weight_forms.of(torch.ones(3, 4), "a", make) is None
    assert make.befores == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])
def test_a_copy_begins_without_forms_because_a_form_may_be_an_address(
    weight: Tensor, copied: Callable[[Tensor], Tensor]
) -> None:
    weight_forms.of(weight, "a", Maker())
    forms = getattr(copied(weight), weight_forms.ATTRIBUTE, None)
    assert forms is None or forms.made == {}


def test_a_weight_that_is_written_before_every_call_is_given_up(
    weight: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    with caplog.at_level("INFO", "fl_dispatch"):
        for _ in range(2 * weight_forms.IN_A_ROW):
            weight.data.add_(1.0)
            found = weight_forms.of(weight, "a", make)
            assert found is None or torch.equal(found, weight)
    assert found is None
    assert len(make.befores) == weight_forms.IN_A_ROW
    assert caplog.text.count("is not prepared") == 1


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "NumPy array": lambda weight: weight.numpy(),
    "NumPy array of .data": lambda weight: weight.data.numpy(),
    "part of a NumPy array": lambda weight: weight.data.numpy().ravel()[3:],
    "NumPy array by DLPack": numpy.from_dlpack,
    "NumPy array by DLPack of .data": lambda weight: numpy.from_dlpack(weight.data),
    "tensor by DLPack": torch.from_dlpack,
    "view": lambda weight: weight.data[:],
}


def write(alias: Any, value: float) -> None:
    """Write without PyTorch, where the alias can."""
    numpy.asarray(alias)[...] = value


@pytest.mark.parametrize("take", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("when", ["before the form", "after the form"])
def test_products_are_of_the_weight_as_it_is_also_where_an_older_alias_writes(
    weight: Tensor, take: Callable[[Tensor], Any], when: str
) -> None:
    make = Maker()
    if when == "after the form":
        form(weight, "a", make)
    alias = take(weight)
    for value in (5.0, 6.0):
        found = weight_forms.of(weight, "a", make)
        assert found is None or torch.equal(found, weight)
        write(alias, value)
        assert weight[1:].eq(value).all(), "the weight was moved away from its alias"
        found = weight_forms.of(weight, "a", make)
        assert found is None or torch.equal(found, weight)
    del alias
    assert torch.equal(form(weight, "a", make), weight), "nobody has the memory any more, so it is prepared"


@pytest.mark.parametrize("take", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("when", ["before the form", "in its first step", "after the form"])
def test_steps_use_the_weight_as_it_is_also_where_an_older_alias_writes(
    weight: Tensor, take: Callable[[Tensor], Any], held: bool, when: str
) -> None:
    """An engine serves while a trainer writes the next weights into the arrays that it keeps."""
    make, forms = Maker(), weight_forms.declare(weight)
    alias = take(weight) if when == "before the form" else None
    with weight_forms.settled([(weight, forms)], held):
        weight_forms.of(weight, "a", make)
        alias = take(weight) if when == "in its first step" else alias
    alias = take(weight) if when == "after the form" else alias
    for value in (5.0, 6.0, 7.0):
        write(alias, value)
        assert weight[1:].eq(value).all(), "the weight was moved away from its alias"
        with weight_forms.settled([(weight, forms)], held):
            found = weight_forms.of(weight, "a", make)
            assert found is None or torch.equal(found, weight)
            assert not held or torch.equal(forms.made["a"], weight), "compiled code reads it without asking"
    del alias
    with weight_forms.settled([(weight, forms)], held):
        form(weight, "a", make)
    made = len(make.befores)
    for _ in range(3):
        with weight_forms.settled([(weight, forms)], held):
            assert torch.equal(form(weight, "a", make), weight)
    assert len(make.befores) == made, "nobody has the memory any more, so it is prepared once"


def test_a_weight_whose_memory_stays_shared_is_given_up_and_the_log_says_why(
    weight: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    alias = weight.data.numpy()
    with caplog.at_level("INFO", "fl_dispatch"):
        for _ in range(2 * weight_forms.IN_A_ROW):
            assert weight_forms.of(weight, "a", make) is None
    assert not weight_forms.may_be(weight)
    assert caplog.text.count("is not prepared") == caplog.text.count("a NumPy array") == 1
    del alias
    weight_forms.weights_were_written([weight])
    assert torch.equal(form(weight, "a", make), weight)


@pytest.mark.parametrize("step", [True, False], ids=["in a step", "in a call"])
def test_a_weight_that_was_given_up_is_tried_again_when_its_memory_has_one_owner(weight: Tensor, step: bool) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    alias = weight.data.numpy()
    for _ in range(3 * weight_forms.IN_A_ROW):
        assert weight_forms.of(weight, "a", make) is None
    del alias
    for _ in range(weight_forms.IN_A_ROW):
        if step:
            weight_forms.follow(weight, forms)
        else:
            weight_forms.of(weight, "a", make)
    assert weight_forms.may_be(weight)
    assert torch.equal(form(weight, "a", make), weight)


def test_a_second_form_that_is_given_up_takes_the_first_one_along(weight: Tensor) -> None:
    first, second = Maker(), Maker()
    form(weight, "a", first)
    alias = weight.data
    for _ in range(weight_forms.IN_A_ROW):
        assert weight_forms.of(weight, "b", second) is None
    assert weight_forms.of(weight, "a", first) is None
    del alias


def test_a_form_that_is_held_is_made_anew_in_every_step_while_memory_is_shared_and_the_log_says_so(
    weight: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    form(weight, "a", make)
    alias = weight.data.numpy()
    with caplog.at_level("WARNING", "fl_dispatch"):
        for _ in range(2 * weight_forms.IN_A_ROW):
            with weight_forms.settled([(weight, forms)]):
                alias += 1.0
                assert torch.equal(forms.made["a"], weight - 1.0)
    assert caplog.text.count("is prepared anew in every step") == 1


def write_to_the_address(address: int, value: float) -> None:
    """Write as an extension does that kept a number."""
    (ctypes.c_float * 12).from_address(address)[:] = [value] * 12


@pytest.mark.parametrize("named", [True, False], ids=["that weight", "all weights"])
@pytest.mark.parametrize("step", [True, False], ids=["in a step", "in a call"])
def test_a_host_says_that_weights_were_written_through_an_address_that_somebody_kept(
    weight: Tensor, named: bool, step: bool
) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    address = weight.data_ptr()
    form(weight, "a", make)
    write_to_the_address(address, 5.0)
    fl_dispatch.weights_were_written([weight] if named else None)
    with weight_forms.settled([(weight, forms)]) if step else nullcontext():
        assert torch.equal(form(weight, "a", make), weight)
        assert weight.eq(5.0).all()
    assert len(make.befores) == 2


def test_weights_that_nobody_declared_may_be_named_as_written() -> None:
    fl_dispatch.weights_were_written([torch.ones(2)])


def test_a_second_form_follows_a_write_after_another_one_was_made_anew(weight: Tensor) -> None:
    """The mark alone does not say whether all forms are new: making one anew sets it for all."""
    makers, forms = {"a": Maker(), "b": Maker()}, weight_forms.declare(weight)
    for name, make in makers.items():
        weight_forms.of(weight, name, make)
    weight.data.mul_(3.0)
    weight_forms.of(weight, "a", makers["a"])
    weight_forms.follow(weight, forms)
    for name in makers:
        assert torch.equal(forms.made[name], weight), "compiled code reads it without asking"


def test_calls_between_two_writes_keep_a_weight_prepared(weight: Tensor) -> None:
    make = Maker()
    for _ in range(2 * weight_forms.IN_A_ROW):
        weight.data.add_(1.0)
        weight_forms.of(weight, "a", make)
        weight_forms.of(weight, "a", make)
    assert weight_forms.of(weight, "a", make) is not None


def test_memory_whose_writes_nobody_can_notice_is_not_prepared() -> None:
    shared = torch.ones(3, 4).share_memory_()
    weight_forms.declare(shared)
    assert weight_forms.of(shared, "a", Maker()) is None


def test_a_part_of_a_memory_is_not_prepared_because_a_mark_is_all_of_its() -> None:
    whole = torch.zeros(24)
    first, second = whole[:12], whole[12:]
    for part in (first, second):
        weight_forms.declare(part)
        assert weight_forms.of(part, "packed", Maker()) is None
        assert not weight_forms.may_be(part)
    whole.fill_(7.0)
    assert first.sum() == second.sum() == 84.0


def test_a_tensor_in_the_place_of_a_weight_gets_its_forms_anew(weight: Tensor) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    weight_forms.of(weight, "a", make)
    other = torch.nn.Parameter(torch.full((3, 4), 5.0), requires_grad=False)
    weight_forms.follow(other, forms)
    assert torch.equal(forms.made["a"], other)
    assert torch.equal(form(other, "a", make), other)
    assert len(make.befores) == 2


def test_compiled_code_uses_what_was_followed_before(weight: Tensor) -> None:
    make, forms = Maker(), weight_forms.declare(weight)

    def double(x: Tensor) -> Tensor:
        found = weight_forms.of(weight, "a", make)
        return x if found is None else x + found

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    zeros = torch.zeros(3, 4)
    assert torch.equal(double(zeros), compiled(zeros))
    weight.data.mul_(3.0)
    weight_forms.follow(weight, forms)
    assert torch.equal(compiled(zeros), weight)
    assert len(make.befores) == 2
    weight_forms.follow(weight, forms)
    assert len(make.befores) == 2


def test_forms_that_are_held_are_never_given_up(weight: Tensor) -> None:
    """A captured graph would go on reading where they were."""
    make, forms = Maker(), weight_forms.declare(weight)
    weight_forms.of(weight, "a", make)
    for _ in range(2 * weight_forms.IN_A_ROW):
        weight.data.add_(1.0)
        weight_forms.follow(weight, forms)
        assert torch.equal(forms.made["a"], weight)
    assert torch.equal(form(weight, "a", make), weight)


# -- while nobody writes ----------------------------------------------------------------------------------------------


def read(weight: Tensor) -> int:
    """Take the mark away without writing, as code that Inductor compiled does, and launchers of kernels."""
    return weight.data_ptr()


def test_a_reader_in_a_step_costs_no_form_and_the_next_write_is_noticed(weight: Tensor) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    first = form(weight, "a", make)
    places = set()
    for _ in range(3):
        with weight_forms.settled([(weight, forms)]):
            places.add(read(weight))
            assert form(weight, "a", make) is first
            places.add(read(weight))
    assert len(make.befores) == len(places) == 1, "made anew, or moved: captured graphs know addresses"
    weight.data.mul_(3.0)
    with weight_forms.settled([(weight, forms)]):
        read(weight)
        assert torch.equal(form(weight, "a", make), weight)
    assert len(make.befores) == 2


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_step_begins_with_what_was_written_since_the_last_one(
    weight: Tensor, write: Callable[[Tensor], object]
) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    weight_forms.of(weight, "a", make)
    with weight_forms.settled([(weight, forms)]):
        read(weight)
    write(weight)
    with weight_forms.settled([(weight, forms)]):
        assert torch.equal(forms.made["a"], weight)
    write(weight)  # and without a step
    assert torch.equal(form(weight, "a", make), weight)
    assert len(make.befores) == 3


def test_a_step_that_fails_is_over(weight: Tensor) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    weight_forms.of(weight, "a", make)
    with pytest.raises(ZeroDivisionError), weight_forms.settled([(weight, forms)]):
        read(weight)
        _ = 1 / 0
    weight.data.mul_(3.0)
    assert torch.equal(form(weight, "a", make), weight)


def test_a_step_that_cannot_begin_is_over(weight: Tensor) -> None:
    """Memory runs out while the second weight is made anew."""
    other = torch.ones(3, 4)
    weights = [(tensor, weight_forms.declare(tensor)) for tensor in (weight, other)]
    make = Maker()
    weight_forms.of(weight, "a", make)

    def fail(now: Tensor, before: Tensor | None) -> Tensor:
        if before is not None:
            raise torch.OutOfMemoryError("no memory")
        return now.clone()

    weight_forms.of(other, "a", fail)
    other.add_(1.0)
    with pytest.raises(torch.OutOfMemoryError), weight_forms.settled(weights):
        pytest.fail("the step began")
    weight.data.mul_(3.0)
    assert torch.equal(form(weight, "a", make), weight)


def test_a_step_inside_another_one_does_not_end_it(weight: Tensor) -> None:
    """vLLM's warm-up runs steps."""
    make, forms = Maker(), weight_forms.declare(weight)
    weight_forms.of(weight, "a", make)
    with weight_forms.settled([(weight, forms)]):
        with weight_forms.settled([(weight, forms)]):
            read(weight)
        read(weight)
        weight_forms.of(weight, "a", make)
    assert len(make.befores) == 1
    weight.data.mul_(3.0)
    assert torch.equal(form(weight, "a", make), weight)


def test_a_form_that_is_first_made_in_a_step_leaves_the_others_as_they_are(weight: Tensor) -> None:
    makers, forms = {"a": Maker(), "b": Maker()}, weight_forms.declare(weight)
    with weight_forms.settled([(weight, forms)]):
        for name in ("a", "b", "a"):
            weight_forms.of(weight, name, makers[name])
            read(weight)
    for name, make in makers.items():
        weight_forms.of(weight, name, make)
        assert len(make.befores) == 1


def test_a_tensor_in_the_place_of_a_weight_is_not_taken_for_it_in_a_step(weight: Tensor) -> None:
    make, forms = Maker(), weight_forms.declare(weight)
    weight_forms.of(weight, "a", make)
    other = torch.full((3, 4), 5.0)
    with weight_forms.settled([(other, forms)]):
        assert torch.equal(form(other, "a", make), other)
    assert len(make.befores) == 2


def test_a_copy_that_is_made_in_a_step_has_no_step(weight: Tensor) -> None:
    forms = weight_forms.declare(weight)
    weight_forms.of(weight, "a", Maker())
    with weight_forms.settled([(weight, forms)]):
        copied = copy.deepcopy(weight)
    make = Maker()
    weight_forms.declare(copied)
    weight_forms.of(copied, "a", make)
    copied.data.mul_(3.0)
    assert torch.equal(form(copied, "a", make), copied)


def test_what_is_made_in_a_capture_is_made_again_because_nothing_has_run(
    weight: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    weight_forms._say_captured.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "fl_dispatch"):
        patch.setattr(weight_forms, "detect_device", lambda: SimpleNamespace(captures=lambda: True))
        for _ in range(2):
            assert torch.equal(form(weight, "a", make), weight)
    assert caplog.text.count("while a graph was captured") == 1
    first = weight_forms.of(weight, "a", make)
    assert weight_forms.of(weight, "a", make) is first
    assert make.befores == [None, None, None]


def test_pytorch_counts_the_owners_of_a_memory() -> None:
    """Without these names no weight is repacked, because an older alias could write unnoticed."""
    assert all(hasattr(owner, name) for owner, name in ((torch._C, "_storage_Use_Count"), (Tensor, "_use_count")))
