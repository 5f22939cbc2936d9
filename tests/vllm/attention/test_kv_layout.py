"""The layout of the KV cache's pages follows the policy, and every layout gives keys and values of their own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

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
from fl_dispatch.hosting.memory.kv_layout import OPERATORS
from fl_dispatch.settings import TunedRule
from vllm_fl.attention import kv_layout
from vllm_fl.attention.dense import AttentionFLBackend, AttentionFLImpl

TRANSPOSED = "HDN/HND"
BLOCKS, HEADS, SLOTS = 5, 2, 16


class Cache(SimpleNamespace):
    """vLLM's configuration of a cache."""

    DEFAULT_BLOCK_SIZE = 16
    block_size = 16
    cache_dtype = "auto"
    user_specified_block_size = False


ALONE: Any = SimpleNamespace(kv_transfer_config=None, model_config=None, cache_config=Cache())
CONNECTED: Any = SimpleNamespace(kv_transfer_config=object(), model_config=None, cache_config=Cache())
HYBRID: Any = SimpleNamespace(
    kv_transfer_config=None, model_config=SimpleNamespace(is_hybrid=True, is_attention_free=False), cache_config=Cache()
)


@pytest.fixture(autouse=True)
def another_vendor() -> Iterator[None]:
    """A vendor whose attention needs transposed keys; everything is as before afterwards."""
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    for op in OPERATORS:
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


def test_a_cache_in_int8_keeps_the_default_and_has_a_scale_beside_each_heads_numbers() -> None:
    config: Any = SimpleNamespace(
        kv_transfer_config=None, model_config=None, cache_config=Cache(cache_dtype="int8_per_token_head")
    )
    assert choose(config, prefer="vendor") == "NHD"
    layer = AttentionFLImpl(4, SLOTS, 0.5, HEADS, kv_cache_dtype="int8_per_token_head")
    numbers, scale = SLOTS, torch.float32.itemsize
    memory = torch.zeros(BLOCKS, SLOTS, HEADS, 2 * (numbers + scale), dtype=torch.int8)
    keys, values, (_, _, key_scales, value_scales) = layer._caches(memory.transpose(1, 2))
    assert keys.shape == values.shape == (BLOCKS, SLOTS, HEADS, numbers)
    keys[3, 5, 1], values[3, 5, 1], key_scales[3, 5, 1], value_scales[3, 5, 1] = 1, 2, 3.0, 4.0
    written = memory[3, 5, 1].split((numbers, scale, numbers, scale))
    assert [part.view(torch.float32).item() for part in written[1::2]] == [3.0, 4.0]
    assert [part.unique().tolist() for part in written[::2]] == [[1], [2]]
    assert memory.count_nonzero() == memory[3, 5, 1].count_nonzero()


def test_the_host_is_told_the_order_that_the_layout_needs() -> None:
    for prefer, name, order in (("vendor", "LBHNC", (0, 1, 2, 3)), ("reference", "LBNHC", (0, 2, 1, 3))):
        choose(prefer=prefer)
        (layout,) = AttentionFLBackend.supported_kv_cache_layouts()
        assert layout.name == name
        assert layout.layer_view_order == order


def test_a_layer_takes_the_layout_that_was_decided_before_it() -> None:
    choose(prefer="vendor")
    layer = AttentionFLImpl(4, SLOTS, 0.5, HEADS)
    choose(prefer="reference")
    keys, _, _ = layer._caches(torch.zeros(BLOCKS, HEADS, SLOTS, 2 * SLOTS))
    assert keys.stride()[1:] == (1, 2 * SLOTS * SLOTS, SLOTS)


def test_the_engine_takes_the_block_size_that_the_implementation_needs() -> None:
    manager = get_default_manager()
    impl = OpImpl(
        "paged_attention",
        "vendor.large",
        BackendImplKind.VENDOR,
        lambda *args, **kwargs: None,
        vendor="large",
        priority=300,
        requires={"kv_layout": "(NHD|NHD)", "kv_block_multiple": 128},
        signature="unchecked",
    )
    manager.registry.register_impl(impl)
    assert choose(prefer="vendor") == "(NHD|NHD)"
    assert AttentionFLBackend.get_preferred_block_size(16) == 128
    assert explain("paged_attention").candidates[0] is impl


def test_a_layout_that_is_merely_faster_is_taken_where_blocks_fit_and_stay(caplog: pytest.LogCaptureFixture) -> None:
    def chosen(block_size: int | None, transfer: object = None) -> str:
        cache = Cache() if block_size is None else Cache(block_size=block_size, user_specified_block_size=True)
        config: Any = SimpleNamespace(kv_transfer_config=transfer, model_config=None, cache_config=cache)
        return choose(config, prefer="vendor", deny_vendors=frozenset({"other"}))

    assert [chosen(size) for size in (None, 64, 8)] == [TRANSPOSED, TRANSPOSED, "NHD"]
    assert chosen(None, object()) == "NHD"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert explain("paged_attention").candidates[0].impl_id == "vendor.cpu.cpp"


def test_a_block_size_that_the_user_chose_stays(caplog: pytest.LogCaptureFixture) -> None:
    test_the_engine_takes_the_block_size_that_the_implementation_needs()
    user: Any = SimpleNamespace(
        kv_transfer_config=None,
        model_config=None,
        cache_config=Cache(block_size=32, user_specified_block_size=True),
    )
    choose(user, prefer="vendor")
    assert AttentionFLBackend.supports_block_size(32)
    assert "'vendor.large' of 'paged_attention' does not run: it needs kv_block_multiple=128" in caplog.text


def groups(*layers: KVCacheSpec) -> Any:
    """A configuration of a cache with a group for each layer."""
    found = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(layers)]
    return SimpleNamespace(kv_cache_groups=found)


FULL: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
WINDOW = SlidingWindowSpec(**{**FULL, "num_kv_heads": 1, "block_size": 256}, sliding_window=512)


def shared_bytes(first: tuple[int, ...], second: tuple[int, ...], blocks: tuple[int, int]) -> bool:
    """Whether block 1 of one shape and block 2 of another, in the same memory, have a byte in common."""
    memory = torch.zeros(4, FULL["block_size"] * 2 * (64 + 64))
    for (slots, heads, size, value_size), block in zip((first, second), blocks, strict=True):
        for part in kv_layout.KVLayout.parse("(NHD|NHD)").split(memory, slots, heads, size, value_size):
            part[block] += 1
    return bool(memory.max() > 1)


def test_groups_whose_keys_are_as_large_may_share_memory() -> None:
    test_the_engine_takes_the_block_size_that_the_implementation_needs()
    kv_layout.refuse_unlike_groups(groups(FullAttentionSpec(**FULL), WINDOW))
    assert not shared_bytes((128, 2, 64, 64), (256, 1, 64, 64), (1, 2))


def test_groups_whose_keys_differ_are_refused_by_name() -> None:
    test_the_engine_takes_the_block_size_that_the_implementation_needs()
    unlike = FullAttentionSpec(**{**FULL, "head_size": 96}, head_size_v=32)
    with pytest.raises(ValueError, match=r"32768 bytes in layer.0, 49152 bytes in layer.1"):
        kv_layout.refuse_unlike_groups(groups(FullAttentionSpec(**FULL), unlike))
    assert shared_bytes((128, 2, 64, 64), (128, 2, 96, 32), (2, 1))  # that is why
    kv_layout.refuse_unlike_groups(groups(unlike, unlike))


STATES = MambaSpec(shapes=((3, 64), (4, 16, 16)), dtypes=(torch.float32, torch.float32), block_size=128)


def test_states_share_no_memory_with_keys_that_lie_apart_from_their_values() -> None:
    test_the_engine_takes_the_block_size_that_the_implementation_needs()
    with pytest.raises(ValueError, match=r"\(NHD\|NHD\) does not allow that, because layer.1 keeps states in it"):
        kv_layout.refuse_unlike_groups(groups(FullAttentionSpec(**FULL), STATES))


def test_beside_states_the_layout_is_one_of_whole_blocks() -> None:
    assert choose(HYBRID, prefer="vendor") == TRANSPOSED
    test_the_engine_takes_the_block_size_that_the_implementation_needs()
    assert choose(HYBRID, prefer="vendor") == "NHD"


def test_whole_blocks_are_shared_by_any_groups() -> None:
    choose(prefer="vendor")
    unlike = FullAttentionSpec(**{**FULL, "head_size": 96}, head_size_v=32)
    kv_layout.refuse_unlike_groups(groups(FullAttentionSpec(**FULL), unlike, STATES))
