"""Layouts of a KV cache are strings in a small grammar; each gives keys and values of their own in a layer's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
)
from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.memory.kv_layout import KVLayout

BLOCKS, SLOTS, HEADS, KEY, VALUE = 5, 16, 2, 8, 6
PAGE = SLOTS * HEADS * (KEY + VALUE)
ORDERS = ["".join(order) for order in permutations("NHD")]
PAIRED = [f"{keys}/{values}" for keys in ORDERS for values in ORDERS if keys[0] == values[0] != "D"]
ALL = [*ORDERS, *PAIRED, *(f"({keys}|{values})" for keys in ORDERS for values in ORDERS)]


def split(name: str, memory: Tensor) -> tuple[Tensor, Tensor]:
    return KVLayout.parse(name).split(memory, SLOTS, HEADS, KEY, VALUE)


@pytest.mark.parametrize("name", ALL)
def test_keys_and_values_fill_the_memory_and_never_overlap(name: str) -> None:
    memory = torch.zeros(BLOCKS, PAGE)
    keys, values = split(name, memory)
    assert (keys.shape, values.shape) == ((BLOCKS, SLOTS, HEADS, KEY), (BLOCKS, SLOTS, HEADS, VALUE))
    keys += 1
    values += 2
    assert sorted(memory.flatten().tolist()) == [1.0] * keys.numel() + [2.0] * values.numel()


@pytest.mark.parametrize("name", [*ORDERS, *PAIRED])
def test_a_block_stays_inside_its_page(name: str) -> None:
    apart = torch.zeros(BLOCKS, PAGE + 3)[:, :PAGE]
    keys, values = split(name, apart)
    keys[2], values[2] = 7, 7
    assert (apart[2] == 7).all()
    assert (apart == 7).sum() == PAGE


def test_the_layouts_that_have_names_lie_as_they_say() -> None:
    memory = torch.arange(BLOCKS * PAGE).view(BLOCKS, PAGE)
    joint = memory.view(BLOCKS, SLOTS, HEADS, KEY + VALUE)
    keys, values = split("NHD", memory)
    assert torch.equal(keys, joint[..., :KEY])
    assert torch.equal(values, joint[..., KEY:])
    parts = memory.view(BLOCKS, HEADS, -1)
    keys, values = split("HDN/HND", memory)
    assert torch.equal(keys, parts[..., : KEY * SLOTS].unflatten(-1, (KEY, SLOTS)).permute(0, 3, 1, 2))
    assert torch.equal(values, parts[..., KEY * SLOTS :].unflatten(-1, (SLOTS, VALUE)).transpose(1, 2))
    keys, values = split("(NHD|NHD)", memory)
    assert torch.equal(keys.flatten(), memory.flatten()[: keys.numel()])
    assert keys.is_contiguous()
    assert values.is_contiguous()


def test_all_keys_first_needs_the_blocks_in_one_piece() -> None:
    with pytest.raises(ValueError, match="needs a layer's blocks in one piece"):
        split("(NHD|NHD)", torch.zeros(BLOCKS, PAGE + 3)[:, :PAGE])


@pytest.mark.parametrize(
    "name", ["NZ", "", "NHDX", "NHH", "NHD|NHD", "(NHD/NHD)", "(NHD|NHD", "HDN/NHD", "DHN/DNH", None]
)
def test_what_is_no_layout_is_refused_with_the_grammar(name: Any) -> None:
    with pytest.raises(ValueError, match="it is axes from the outermost to the innermost"):
        KVLayout.parse(name)


# -- who decides, and who is told -------------------------------------------------------------------------------------


@pytest.fixture
def vendor() -> Iterator[Callable[..., None]]:
    """Registers a vendor's implementations of some operators, which require something, and prefers them."""
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()

    def register(*operators: str, properties: dict[str, Any] | None = None, **requires: Any) -> None:
        for op in operators:
            impl = OpImpl(
                op, "vendor.nimbus", BackendImplKind.VENDOR, print, vendor="nimbus", priority=200, requires=requires,
                signature="unchecked", properties=properties or {},
            )  # fmt: skip
            manager.registry.register_impl(impl)
        set_global_policy(SelectionPolicy(prefer="vendor", allow_vendors=frozenset({"nimbus"})))

    yield register
    reset_default_manager()
    reset_global_policy()


def stated(block_size: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a start with blocks of this size."""
    caplog.set_level(logging.WARNING)
    kv_layout.state(kv_layout.preference().layout or KVLayout.parse("NHD"), block_size)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def chosen(op: str) -> str:
    return get_default_manager().explain(op).candidates[0].impl_id


def test_a_pair_that_gets_its_layout_and_its_blocks_runs_without_a_word(vendor: Any, caplog: Any) -> None:
    vendor(*kv_layout.OPERATORS, kv_layout="(NHD|NHD)", kv_block_multiple=128)
    assert kv_layout.preference() == kv_layout.Preference(KVLayout.parse("(NHD|NHD)"), 128)
    assert not stated(256, caplog)
    assert [chosen(op) for op in kv_layout.OPERATORS] == ["vendor.nimbus"] * 2


def test_who_is_merely_faster_with_a_layout_is_asked_where_nobody_requires_one(vendor: Any, caplog: Any) -> None:
    vendor("paged_attention", properties={"kv_layout": "HDN/HND", "kv_block": 32})
    assert kv_layout.preference() == kv_layout.Preference(KVLayout.parse("HDN/HND"), 1, 32, optional=True)
    assert not stated(16, caplog)
    vendor("kv_cache_write", kv_layout="NHD", kv_block_multiple=64)
    assert kv_layout.preference() == kv_layout.Preference(KVLayout.parse("NHD"), 64)


def test_a_block_size_that_does_not_fit_is_said_by_name(vendor: Any, caplog: Any) -> None:
    vendor(*kv_layout.OPERATORS, kv_block_multiple=128)
    warnings = stated(16, caplog)
    assert len(warnings) == 2
    assert warnings[0] == (
        "'vendor.nimbus' of 'paged_attention' does not run: it needs kv_block_multiple=128, but here it is "
        "1 or 2 or 4 or 8 or 16; 'reference.torch' runs"
    )


@pytest.mark.parametrize(("has", "lacks"), [kv_layout.OPERATORS, kv_layout.OPERATORS[::-1]])
def test_one_of_the_pair_without_the_other_is_said_by_name(vendor: Any, caplog: Any, has: str, lacks: str) -> None:
    vendor(has, kv_layout="HND")
    (warning,) = stated(16, caplog)
    assert f"'vendor.nimbus' of '{has}' has the cache laid as HND, and has no partner for '{lacks}'" in warning
    assert "'reference.torch' runs on that layout" in warning
    assert chosen(has) == "vendor.nimbus"


def test_a_layout_that_nothing_can_state_is_said_by_name(vendor: Any, caplog: Any) -> None:
    vendor("paged_attention", kv_layout="NZ")
    (warning,) = stated(16, caplog)
    assert warning.startswith("'vendor.nimbus' of 'paged_attention' does not run: 'NZ' is no layout of a KV cache")
    assert warning.endswith("'reference.torch' runs")


@pytest.mark.parametrize("multiple", [0, -128, "128", 1.5])
def test_a_block_multiple_that_is_no_number_of_slots_is_said_by_name(vendor: Any, caplog: Any, multiple: Any) -> None:
    vendor("paged_attention", kv_block_multiple=multiple)
    assert kv_layout.preference() == kv_layout.Preference()
    (warning,) = stated(16, caplog)
    problem = f"kv_block_multiple is a whole number above 0, not {multiple!r}"
    assert warning.startswith(f"'vendor.nimbus' of 'paged_attention' does not run: {problem}; ")
