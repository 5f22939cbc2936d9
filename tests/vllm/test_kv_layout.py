"""The layout of the KV cache's pages follows the policy, and every layout gives keys and values of their own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    explain,
    get_default_manager,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
)
from fl_dispatch.settings import TunedRule
from vllm_fl import kv_layout
from vllm_fl.attention import AttentionFLBackend, AttentionFLImpl
from vllm_fl.compat.v0_26 import attention as v0_26_attention

TRANSPOSED = "HDN/HND"
BLOCKS, HEADS, SLOTS, KEY, VALUE = 5, 2, 16, 8, 6
ALONE: Any = SimpleNamespace(kv_transfer_config=None)
CONNECTED: Any = SimpleNamespace(kv_transfer_config=object())


@pytest.fixture(autouse=True)
def another_vendor() -> Iterator[None]:
    """A vendor whose attention needs transposed keys; everything is as before afterwards."""
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    for op in kv_layout.OPERATORS:
        impl = OpImpl(
            op,
            "vendor.other",
            BackendImplKind.VENDOR,
            lambda *args, **kwargs: None,
            vendor="other",
            priority=200,
            requires={"kv_layout": TRANSPOSED},
            signature="unchecked",
        )
        manager.registry.register_impl(impl)
    set_global_policy(SelectionPolicy(prefer="reference"))
    yield
    reset_default_manager()
    reset_global_policy()
    kv_layout.choose(CONNECTED)


def choose(config: Any = ALONE, **policy: Any) -> str:
    set_global_policy(SelectionPolicy(**policy))
    return kv_layout.choose(config).name


def test_the_implementation_that_comes_first_decides() -> None:
    assert choose(prefer="vendor") == TRANSPOSED
    assert explain("paged_attention").candidates[0].impl_id == "vendor.other"


def test_without_one_that_needs_a_layout_the_default_stays_and_the_vendors_are_out() -> None:
    assert choose(prefer="reference") == "NHD"
    set_global_policy(SelectionPolicy(prefer="vendor"))
    reasons = {entry.impl.impl_id: entry.reason for entry in explain("paged_attention").considered}
    assert reasons["vendor.other"] == "it needs kv_layout='HDN/HND', but here it is 'NHD'"


def test_a_second_engine_in_the_process_decides_anew() -> None:
    assert [choose(prefer=prefer) for prefer in ("vendor", "reference", "vendor")] == [TRANSPOSED, "NHD", TRANSPOSED]


def test_a_denied_vendor_decides_nothing() -> None:
    assert choose(prefer="vendor", deny_vendors=frozenset({"other", "cpu"})) == "NHD"


def test_one_conditional_rule_is_enough() -> None:
    decode = TunedRule(order=("vendor:other",), phase="decode")
    assert choose(prefer="reference", op_tuned=(("paged_attention", (decode,)),)) == TRANSPOSED


def test_pages_that_other_instances_read_keep_the_default() -> None:
    assert choose(CONNECTED, prefer="vendor") == "NHD"


def test_the_host_is_told_the_order_that_the_layout_needs() -> None:
    for prefer, name in (("vendor", "LBHNC"), ("reference", "LBNHC")):
        choose(prefer=prefer)
        (layout,) = AttentionFLBackend.supported_kv_cache_layouts()
        assert layout.name == name
        assert layout.layer_view_order == v0_26_attention.get_kv_cache_stride_order()


def pages(layout: kv_layout.KVLayout) -> Tensor:
    """A cache as vLLM hands it over: logical order blocks, heads, slots, both; in memory as the layout says."""
    shape = (BLOCKS, HEADS, SLOTS, KEY + VALUE)
    memory = torch.zeros([shape[axis] for axis in layout.stride_order])
    return memory.permute([layout.stride_order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("layout", kv_layout.LAYOUTS.values(), ids=lambda layout: layout.name)
def test_keys_and_values_fill_the_page_and_never_overlap(layout: kv_layout.KVLayout) -> None:
    cache = pages(layout)
    keys, values = layout.split(cache, KEY)
    assert keys.shape == (BLOCKS, SLOTS, HEADS, KEY)
    assert values.shape == (BLOCKS, SLOTS, HEADS, VALUE)
    keys += 1
    values += 2
    assert sorted(cache.flatten().tolist()) == [1.0] * keys.numel() + [2.0] * values.numel()
    keys[2] = 7
    assert (cache[2] == 7).sum() == keys[2].numel(), "a block stays inside its page"


def test_a_layer_takes_the_layout_that_was_decided_before_it() -> None:
    choose(prefer="vendor")
    layer = AttentionFLImpl(4, SLOTS, 0.5, HEADS)
    choose(prefer="reference")
    keys, _ = layer._caches(torch.zeros(BLOCKS, HEADS, SLOTS, 2 * SLOTS))
    assert keys.stride()[1:] == (1, 2 * SLOTS * SLOTS, SLOTS)
