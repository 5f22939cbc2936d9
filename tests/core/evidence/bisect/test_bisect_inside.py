"""Code of ``fl bisect`` for engines' processes: it reads choices, switches, and moves results at random."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fl_dispatch import (
    SelectionPolicy,
    bind_op,
    call_op,
    freeze_dispatch,
    get_default_manager,
    reset_default_manager,
    set_global_policy,
    thaw_dispatch,
)
from fl_dispatch.evidence.bisect.choices import Choices, Site
from fl_dispatch.evidence.bisect.inside import MOVED, PART, answer, moved_id, switch
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import Settings

REFERENCE = SelectionPolicy(prefer="reference")
COMPUTING = sorted(name for name, operator in OPERATORS.items() if not operator.selection)


def moved(*ops: str) -> str:
    """The policy under which the references' results are moved, as text."""
    orders = {op: [f"impl:{moved_id('reference.torch')}"] for op in ops}
    return Settings(policy=SelectionPolicy.from_dict(prefer="reference", strict=True, per_op_order=orders)).to_json()


@pytest.fixture(autouse=True)
def _a_manager_of_its_own() -> Iterator[None]:
    set_global_policy(REFERENCE)
    yield
    thaw_dispatch()
    reset_default_manager()


def rows() -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_moved_at_most_by_a_part_of_what_the_declaration_accepts(dtype: torch.dtype) -> None:
    x = rows().to(dtype)
    exact = call_op("silu_and_mul", x).float()
    assert switch(moved("silu_and_mul"), 1) == ""
    found = call_op("silu_and_mul", x).float()
    largest = exact.abs().maximum(exact.square().mean(-1, keepdim=True).sqrt())
    rounding = torch.finfo(dtype).eps * largest
    apart = (found - exact).abs()
    assert (apart <= PART * OPERATORS["silu_and_mul"].tolerances[dtype].rtol * largest + rounding).all()
    assert (apart > 0).float().mean() > 0.3


def test_the_same_seed_moves_alike_and_another_one_otherwise() -> None:
    found = []
    for seed in (1, 1, 2):
        switch(moved("silu_and_mul"), seed)
        found.append(call_op("silu_and_mul", rows()))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", COMPUTING)
def test_every_operators_results_can_be_moved(name: str) -> None:
    switch(moved(name), 1)
    samples = OPERATORS[name].samples
    assert samples is not None
    sample = next(iter(samples(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))))
    get_default_manager().set_counting(True)
    call_op(name, *sample.args)
    assert get_default_manager().call_counts()[name, moved_id("reference.torch")] == 1


def test_bound_layers_follow_a_switch_and_the_answer_says_what_ran() -> None:
    norm = bind_op("rms_norm", "model.layers.3.norm")
    x = rows()
    before = norm(x)
    assert switch(moved("rms_norm"), 1) == ""
    assert not torch.equal(norm(x), before)
    choices = Choices.of(answer(None))
    site = Site("rms_norm", "model.layers.3.norm")
    assert choices.at[site] == (((), (moved_id("reference.torch"),)),)
    assert choices.ran is not None
    assert choices.ran["rms_norm"] == {moved_id("reference.torch")}
    assert switch(Settings(policy=REFERENCE).to_json()) == ""
    assert torch.equal(norm(x), before)


def test_layers_that_share_a_module_are_one_site() -> None:
    shared = torch.nn.Identity()
    model = torch.nn.ModuleDict(
        {"a": torch.nn.ModuleDict({"rotary": shared}), "b": torch.nn.ModuleDict({"rotary": shared})}
    )
    bind_op("rotary_embedding", "a.rotary")
    sites = Choices.of(answer(model)).at
    assert Site("rotary_embedding", "a.rotary", ("b.rotary",)) in sites


def test_a_frozen_process_says_that_it_cannot_be_switched() -> None:
    bind_op("rms_norm", "model.norm")
    switch(moved("rms_norm"), 1)
    freeze_dispatch(compiling=False)
    assert "rms_norm" in switch(Settings(policy=REFERENCE).to_json())


def test_copies_are_made_once_and_only_for_those_that_ask() -> None:
    registry = get_default_manager().registry
    get_default_manager().ensure_initialized()
    assert not any(impl.vendor == MOVED for impl in registry.get_implementations("rms_norm"))
    switch(moved("rms_norm"), 1)
    count = len(registry.get_implementations("rms_norm"))
    switch(moved("rms_norm"), 2)
    assert len(registry.get_implementations("rms_norm")) == count
