"""Where numbers stop being finite: the first call that makes NaN or infinity of finite arguments, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import OpManager
from fl_dispatch.ops import OPERATORS
from fl_dispatch.shadow.origin import Origin, watching

Tensor = torch.Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    result: Tensor = OPERATORS["silu_and_mul"].reference(x)
    return result


def manager_with(fault: float) -> OpManager:
    """A manager with a gate that makes a fault of rows with more than 5 at their beginning."""

    def faulty(x: Tensor) -> Tensor:
        return torch.where(x[..., :1] > 5, fault, silu_and_mul(x))

    norm = OPERATORS["rms_norm"].reference
    return manager_of(
        impl("vendor.mine", faulty, op="silu_and_mul"),
        impl("reference.torch", norm, op="rms_norm"),
    )


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_call_that_damages_is_the_origin_with_its_layer(fault: float, frozen: bool) -> None:
    manager = manager_with(fault)
    right, wrong = torch.ones(3, 8), torch.ones(3, 8)
    wrong[1] = 6.0
    manager.bind("silu_and_mul", "layers.0.act")(right)
    if frozen:
        manager.freezer.freeze(compiling=False)
    with watching(manager.state) as found:
        gates = [manager.bind("silu_and_mul", f"layers.{layer}.act") for layer in range(3)]
        norm = manager.bind("rms_norm", "layers.1.norm")
        gates[0](right)
        assert not found
        gates[1](wrong)
        norm(gates[1](wrong), None, None, 1e-6)
        gates[2](wrong)
    assert found == {0: Origin("silu_and_mul", "vendor.mine", "layers.1.act")}
    assert str(found[0]) == "'silu_and_mul' by 'vendor.mine' in layers.1.act"


def test_each_request_of_a_step_has_its_own_origin() -> None:
    manager = manager_with(torch.nan)
    x = torch.ones(7, 8)
    manager.call("silu_and_mul", x)
    with watching(manager.state, rows=[2, 1, 3, 1]) as found:
        x[3:6] = torch.nan  # of the third request, from elsewhere
        x[2] = 6.0
        manager.bind("silu_and_mul", "layers.0.act")(x)
        x[2], x[:2] = torch.nan, 6.0
        manager.bind("silu_and_mul", "layers.1.act")(x)
        rows = torch.ones(4, 8)  # a tensor with a row for each request
        rows[3] = 6.0
        manager.bind("silu_and_mul", "layers.2.act")(rows)
    layers = {place: origin.layer for place, origin in found.items()}
    assert layers == {1: "layers.0.act", 0: "layers.1.act", 3: "layers.2.act"}


def test_a_result_without_rows_of_requests_is_an_origin_only_if_no_request_was_damaged_before() -> None:
    manager = manager_with(torch.nan)
    rows, other = [2, 1], torch.full((5, 8), 6.0)
    manager.call("silu_and_mul", other)
    with watching(manager.state, rows) as found:
        manager.bind("silu_and_mul", "layers.0.act")(other)
    assert {*found} == {0, 1}
    with watching(manager.state, rows) as found:
        other[0] = torch.nan
        manager.bind("silu_and_mul", "layers.0.act")(other)
    assert not found


def test_a_call_with_damaged_arguments_is_no_origin() -> None:
    manager = manager_with(torch.nan)
    damaged = torch.full((2, 8), torch.nan)
    with watching(manager.state) as found:
        manager.call("silu_and_mul", damaged)
        manager.call("rms_norm", damaged, None, None, 1e-6)
    assert not found


def test_what_stood_before_the_implementations_stands_there_again() -> None:
    manager = manager_with(torch.nan)
    gate: Any = manager.bind("silu_and_mul", "layers.0.act")
    gate(torch.ones(1, 8))
    before = manager.table_keeper.root.entries["silu_and_mul@layers.0.act"]
    with watching(manager.state) as found:
        gate(torch.full((1, 8), 6.0))  # a function that was bound before is looked at too
    assert len(found) == 1
    assert manager.state.wrapper is None
    assert manager.table_keeper.root.entries["silu_and_mul@layers.0.act"] is before


def test_keys_that_are_written_damaged_are_an_origin() -> None:
    reference = OPERATORS["kv_cache_write"].reference

    def faulty(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        reference(key * torch.inf, value, key_cache, value_cache, slot_mapping)

    manager = manager_of(impl("vendor.mine", faulty, op="kv_cache_write"))
    cache = torch.full((2, 16, 4, 8), torch.nan)  # what earlier requests left does not matter
    new, slots = torch.ones(3, 4, 8), torch.tensor([1, 2, 3])
    manager.call("kv_cache_write", new, new, cache, cache.clone(), slots)  # first calls are not looked at
    with watching(manager.state) as found:
        manager.call("kv_cache_write", new, new, cache, cache.clone(), slots)
    assert [origin.operator for origin in found.values()] == ["kv_cache_write"]
