"""The layout of SGLang's cache is what the policy's implementations require, unless SGLang's own attention reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.memory.kv_layout import KVLayout, Preference
from sglang_fl.attention import indexer, pools

WANTED = KVLayout.parse("HDN/HND")


@pytest.fixture(autouse=True)
def stated(monkeypatch: pytest.MonkeyPatch) -> list[KVLayout]:
    """The layouts that are stated; an implementation that requires :data:`WANTED` comes first."""
    found: list[KVLayout] = []
    monkeypatch.setattr(kv_layout, "preference", lambda: Preference(WANTED))
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


def test_a_token_is_counted_with_all_of_its_rows_and_index_keys(scheduler: None) -> None:
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    layers, slots, page = torch.nn.ModuleList(), 64, 16
    rows = torch.zeros(slots, 1, 32 + 8, dtype=torch.bfloat16)
    for number in range(2):  # of three layers, because the last one takes the second's lists
        layer = indexer.IndexerFL.__new__(indexer.IndexerFL)
        torch.nn.Module.__init__(layer)
        layer.dim, layer.layer_id = 128, number
        layer.weights_proj = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        layer.reserve(rows, page, SimpleNamespace(lists=None))
        layers.append(layer)
    sizes = SimpleNamespace(
        model=layers,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(), kv_lora_rank=32, qk_rope_head_dim=8),
        kv_cache_dtype=torch.bfloat16,
        use_mla_backend=True,
        server_args=SimpleNamespace(enable_hisparse=True),
        is_draft_worker=False,
    )
    configurator = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    used = 3 * rows.nbytes + sum(layer.cache.nbytes for layer in layers)
    assert configurator._compute_cell_size(sizes, 3) * slots == used
