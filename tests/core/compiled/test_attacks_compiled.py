"""Attacks on frozen and compiled dispatch."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import processes
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
from fl_dispatch.run.keeper import KEPT_TABLES

pytestmark = pytest.mark.usefixtures("results_are_names")

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
    for number in range(KEPT_TABLES + 200):
        policy = SelectionPolicy(deny_vendors=frozenset({f"vendor{number}"}))
        with policy_context(policy):
            policies.append(weakref.ref(policy))
    with policy_context(SelectionPolicy(strict=True)):
        del policy
        gc.collect()
        assert sum(reference() is not None for reference in policies) <= KEPT_TABLES


LIAR = """
import sys
import torch
from fl_dispatch import BackendImplKind, DispatchError, OpImpl, call_op, get_default_manager

def liar(x):
    half = x.shape[-1] // 2
    right = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
    if x.shape[0] < 4:
        return right
    return right.to(torch.bfloat16) if sys.argv[1] == "dtype" else right[:, :2]

registry = get_default_manager().registry
registry.register_impl(
    OpImpl("silu_and_mul", "default.liar", BackendImplKind.DEFAULT, liar, priority=999, opaque=True)
)
compiled = torch.compile(lambda x: call_op("silu_and_mul", x) + 1, fullgraph=True, dynamic=True, backend=sys.argv[2])
for rows in (2, 2, 3):
    compiled(torch.ones(rows, 64))
try:
    print("ran:", compiled(torch.ones(8, 64)).sum().item())
except DispatchError as error:
    print("refused" if "default.liar" in str(error) else error)
"""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("lie", ["dtype", "shape"])
def test_a_result_that_is_not_as_declared_is_an_error_in_any_call(lie: str, backend: str) -> None:
    """In a process of its own, because compiled code reads and frees such memory wrongly."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ended = processes.python("-c", LIAR, lie, backend, environment=environment, timeout=240)
    assert (ended.returncode, ended.last_line) == (0, "refused")
