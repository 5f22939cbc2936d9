"""Attacks on frozen and compiled dispatch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from builders import impl
from fl_dispatch import (
    NotSupported,
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    freeze_dispatch,
    get_default_manager,
    policy_context,
    thaw_dispatch,
)

Tensor = torch.Tensor
OP = "mul_and_silu"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    thaw_dispatch()


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


WAYS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "by name": lambda: lambda x: call_op(OP, x),
    "bound": lambda: bind_op(OP),
    "bound for a layer": lambda: bind_op(OP, "layers.0"),
    "compiled": lambda: compiled(lambda x: call_op(OP, x)),
    "bound and compiled": lambda: compiled(bind_op(OP)),
}


@pytest.mark.parametrize("frozen", ["not frozen", "frozen before", "frozen after"])
@pytest.mark.parametrize("way", WAYS)
def test_an_implementation_for_another_device_than_this_machines_is_not_chosen_here(way: str, frozen: str) -> None:
    registry = get_default_manager().registry
    registry.register_impl(impl("default.a", lambda x: x[..., ::2] + 77, op=OP, device_types=("meta",), priority=999))
    x = torch.ones(2, 4)
    assert explain(OP, x).chosen.impl_id == "reference.torch"
    if frozen == "frozen before":
        freeze_dispatch()
    call = WAYS[way]()
    if frozen == "frozen after":
        freeze_dispatch()
    for _ in range(2):
        assert call(x).lt(2).all()
        assert call(torch.ones(2, 4, device="meta")).is_meta
    assert explain(OP, x).chosen.impl_id == "reference.torch"


def test_an_implementation_for_this_machines_device_declines_tensors_elsewhere_itself() -> None:
    def here(x: Tensor) -> Tensor:
        if not x.is_cpu:
            raise NotSupported("elsewhere")
        return x[..., ::2] + 77

    registry = get_default_manager().registry
    registry.register_impl(impl("default.a", here, op=OP, device_types=("cpu",), priority=999))
    for _ in range(2):
        assert call_op(OP, torch.ones(2, 4)).gt(2).all()
        assert call_op(OP, torch.ones(2, 4, device="meta")).is_meta
    assert get_default_manager().get_failed_impls() == {}
    freeze_dispatch()
    with pytest.raises(NotSupported):
        call_op(OP, torch.ones(2, 4, device="meta"))


def test_policies_that_were_asked_about_while_dispatch_is_frozen_are_not_kept_for_ever() -> None:
    freeze_dispatch()
    policies = []
    for number in range(400):
        policy = SelectionPolicy(deny_vendors=frozenset({f"vendor{number}"}))
        with policy_context(policy):
            policies.append(weakref.ref(policy))
    with policy_context(SelectionPolicy(strict=True)):
        del policy
        gc.collect()
        assert sum(reference() is not None for reference in policies) <= 200
