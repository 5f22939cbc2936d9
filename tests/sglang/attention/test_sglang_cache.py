"""The layout of SGLang's cache is what the policy's implementations require, unless SGLang's own attention reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.memory.kv_layout import KVLayout, Wish
from sglang_fl.attention import pools

WANTED = KVLayout.parse("HDN/HND")


@pytest.fixture(autouse=True)
def stated(monkeypatch: pytest.MonkeyPatch) -> list[KVLayout]:
    """The layouts that are stated; an implementation that requires :data:`WANTED` comes first."""
    found: list[KVLayout] = []
    monkeypatch.setattr(kv_layout, "wish", lambda: Wish(WANTED))
    monkeypatch.setattr(kv_layout, "state", lambda layout, page_size: found.append(layout))
    monkeypatch.setattr(pools, "_in_force", pools.DEFAULT)
    return found


def pool(dtype: torch.dtype = torch.float32) -> pools.KVPoolFL:
    sizes = {"page_size": 16, "head_num": 2, "head_dim": 8, "layer_num": 1}
    return pools.KVPoolFL(64, dtype=dtype, device="cpu", enable_memory_saver=False, **sizes)


def test_the_cache_is_laid_out_as_the_first_implementation_requires(stated: list[KVLayout]) -> None:
    pools.choose(16)
    assert pool().get_key_buffer(0).shape == (5, 16, 2, 8)
    assert stated == [WANTED]


def test_a_cache_in_fp8_has_that_layout_too(stated: list[KVLayout]) -> None:
    pools.choose(16)
    cache = pool(torch.float8_e4m3fn)
    keys, values = cache.get_key_buffer(0), cache.get_value_buffer(0)
    assert keys.shape == values.shape == (5, 16, 2, 8)
    assert keys.dtype is values.dtype is torch.float8_e4m3fn
    keys[1, 3, 1] = torch.full((8,), 3.0).to(torch.float8_e4m3fn)
    assert (cache.get_key_buffer(0)[1, 3, 1].float() == 3.0).all()
    assert not values.float().any()


def test_sglangs_own_attention_finds_its_rows(stated: list[KVLayout]) -> None:
    pools.choose(16, ["torch_native"])
    cache, slots, rows = pool(), torch.tensor([16, 17, 40]), torch.rand(3, 2, 8)
    cache.set_kv_buffer(SimpleNamespace(layer_id=0), slots, rows, rows + 1)
    assert torch.equal(cache.get_key_buffer(0)[slots], rows)
    assert torch.equal(cache.get_value_buffer(0)[slots], rows + 1)
    assert stated == [pools.DEFAULT]
