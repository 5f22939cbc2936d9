"""Sparse latent attention in engines: ranks, compiled models, short contexts, half types' index keys.

``test_families.py`` serves both models eagerly, and tries wrong implementations of their operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, STEP, Runs, ran, start

from fl_dispatch.cli.checkpoints import build_checkpoint
from fl_dispatch.ops.quantization import FP8
from running import expected_tokens
from sampling import drawn

WAYS: Mapping[str, Mapping[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "compiled": {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}},
    "one request at a time": {"max_num_seqs": 1},
    "chunks of 16 tokens, no prefix cache": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
}
ALONE = "one request at a time"
DRAWN = [ALONE, *drawn([way for way in WAYS if way != ALONE], 1, "ways to run sparse latent attention")]
FAMILY = "deepseek_v32"


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    whole = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}  # with breakable graphs, the default here, nothing is compiled
    model = checkpoint(FAMILY)
    return Runs({way: start(model, STEP, STEP, engine=WAYS[way], variables=whole) for way in DRAWN})


@pytest.mark.parametrize("way", DRAWN)
def test_tokens_equal_hugging_faces(
    way: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    for step in results[way]["steps"]:
        assert step["tokens"] == expected(FAMILY)
    assert ran(results[way], "index_topk")
    assert results[way]["report"]["native_layers"] == {}


def test_a_request_takes_dense_attention_until_it_has_more_tokens_than_are_listed(results: Mapping[str, Any]) -> None:
    """Prompts of 1 and 7 tokens grow beyond 20 only as they are answered, and the last one does not at all."""
    calls = {key.split(" ")[0]: count for key, count in results[ALONE]["report"]["counts"].items()}
    assert min(calls[name] for name in ("mla_prefill", "mla_decode", "mla_sparse")) > 0
    assert calls["mla_sparse"] == calls["index_topk"] < calls["index_key_write"] == calls["kv_cache_write"]
    assert min(map(len, PROMPTS)) < 20 < max(map(len, PROMPTS))


FAULTS = (
    "the last token of each list is missed",
    "a chunk of a prompt lists its own tokens alone",
    "of equal scores the higher position is listed",
)
"""Of ``planted_faults``."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Future[dict[str, Any]]]:
    """A model with one head of an indexer, which gives half of the tokens a score of 0."""
    model = build_checkpoint(FAMILY, tmp_path_factory.mktemp("ties") / FAMILY, index_n_heads=1)
    orders = [[f"impl:vendor.planted.{fault.replace(' ', '-')}"] for fault in FAULTS]
    policies = [{"prefer": "reference", "per_op_order": {"index_topk": order}} for order in orders]
    steps = [STEP, *({**STEP, "policy": policy, "reset": True} for policy in policies)]
    variables = {"VLLM_FL_PLUGIN_MODULES": "planted_lists", "VLLM_FL_DENY_VENDORS": "planted"}
    return model, start(model, *steps, variables=variables)


def test_a_wrong_list_changes_the_tokens(faulty: tuple[Path, Future[dict[str, Any]]]) -> None:
    """A row missed, another order of ties, the window of a chunk: each by itself."""
    model, started = faulty
    right, *wrong = (step["tokens"] for step in started.result()["steps"])
    assert right == expected_tokens(model)
    assert {fault: tokens != right for fault, tokens in zip(FAULTS, wrong, strict=True)} == dict.fromkeys(FAULTS, True)


@pytest.mark.parametrize(
    ("dtype", "asked", "fp8"),
    [("float32", "auto", False), ("bfloat16", "auto", True), ("bfloat16", "bf16", False), ("float32", "fp8", True)],
)
def test_index_keys_of_half_types_are_in_fp8_unless_asked_otherwise(dtype: str, asked: str, fp8: bool) -> None:
    from vllm.config import AttentionConfig

    from vllm_fl.layers import indexer

    class Configured:
        model_config = type("Model", (), {"dtype": getattr(torch, dtype)})
        attention_config = AttentionConfig(indexer_kv_dtype=asked)

    assert indexer.stores_fp8(Configured) is fp8


def test_a_block_in_fp8_has_its_scales_behind_its_keys_in_132_bytes_a_token() -> None:
    """Blocks of a group of layers lie apart, so a view's stride is larger than the block."""
    from vllm_fl.layers.indexer import IndexCacheFL

    cache = IndexCacheFL.__new__(IndexCacheFL)
    torch.nn.Module.__init__(cache)
    cache.fl_set_slot_format(128, torch.bfloat16, True)
    assert (cache.head_dim, cache.dtype) == (132, torch.uint8)
    memory = torch.zeros(3, 4 * 132 + 64, dtype=torch.uint8)
    cache.bind_kv_cache(memory[:, : 4 * 132].view(3, 1, 4, 132))
    assert (cache.fl_keys.shape, cache.fl_keys.dtype) == ((3, 4, 128), FP8)
    assert cache.fl_scales is not None
    cache.fl_keys[1, 2].view(torch.uint8).fill_(1)
    cache.fl_scales[1, 2] = 2.0
    assert memory[1, 2 * 128 : 3 * 128].eq(1).all()
    assert memory[1, 4 * 128 + 2 * 4 : 4 * 128 + 3 * 4].view(torch.float32).item() == 2.0
    assert memory.count_nonzero() == 128 + 1


def test_graphs_break_at_the_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures these models in breakable graphs by default, and a graph would repeat a batch's lengths."""
    from vllm.compilation import breakable_cudagraph
    from vllm_fl.layers import indexer

    monkeypatch.setattr(breakable_cudagraph, "is_breakable_cudagraph_enabled", lambda: True)
    assert indexer.outside_graphs().__wrapped__ is indexer._sparse_index  # type: ignore[attr-defined]


def test_the_first_layer_of_a_rank_may_not_take_the_list_of_another_rank() -> None:
    from vllm_fl.attention.sparse import SparseMLAFLImpl
    from vllm_fl.layers import indexer

    def layer(own: object) -> torch.nn.Module:
        made = torch.nn.Module()
        made.impl = SparseMLAFLImpl.__new__(SparseMLAFLImpl)
        made.impl.fl_indexer = own
        return made

    indexer.check(torch.nn.ModuleList([layer("indexer"), layer(None)]))
    with pytest.raises(ValueError, match="does not support '0' as the first layer of a rank yet"):
        indexer.check(torch.nn.ModuleList([layer(None), layer("indexer")]))


def test_graphs_are_asked_about_every_operator_of_the_indexer_and_its_attention() -> None:
    from vllm_fl.attention.sparse_metadata import INDEX_OPERATORS
    from vllm_fl.platform.config import SPARSE_OPERATORS

    assert (*INDEX_OPERATORS, "mla_sparse") == SPARSE_OPERATORS
