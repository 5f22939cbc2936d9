"""Quantized models with sparse latent attention in vLLM's engines: what the dequantized network computes.

A step that lists tokens is in the absorbed form, and one for a short prompt is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import quantized_checkpoints as checkpoints
from host_engines import Engine, Host, Pass, Served
from latent_cache import ENGINE, SCALES, LatentCaches, read_from_cache
from latent_cache import Run as CacheRun
from quantized_checkpoints import SCHEMES
from quantized_mixture import LATENT_LAYERS, QuantizedSparse, SparseRun, sparse
from sampling import drawn

pytestmark = pytest.mark.engine
BLOCKS = "fp8, blocks of 128"
OTHERS = (
    "compressed-tensors W8A8 fp8, blocks of 128",
    "compressed-tensors W8A8 int8",
    "compressed-tensors W4A16",
    "awq",
)
LISTS = ("index_key_write", "index_topk", "mla_sparse")
RANKS = SparseRun(BLOCKS, {"tensor_parallel_size": 2}, "two ranks")
COMPILED = SparseRun(BLOCKS, {"enforce_eager": False}, "compiled")
FORCED = {"attention_config": {"sparse_mla_force_mqa": True}}
EXTENDED = {**ENGINE, **FORCED, "worker_extension_cls": "worker_extension.TrainerExtension"}


class TestSparse(QuantizedSparse):
    ATTENTION = ("kv_cache_write", "mla_decode", "mla_prefill", *LISTS)
    PLACE: ClassVar[Any] = {**QuantizedSparse.PLACE, "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}  # else nothing is compiled
    ALONE = [SparseRun(name, kind="eager") for name in (BLOCKS, *drawn(OTHERS, 1, "sparse, others"))]
    RUNS = [*ALONE, *drawn([RANKS, COMPILED], 1, "sparse, compiled and ranks")]

    def test_its_attention_is_ours(self, run: SparseRun, served: Callable[[SparseRun], Served]) -> None:
        assert all(report["attention"] == {"SparseMLAFLImpl": LATENT_LAYERS} for report in served(run).reports)


class TestCaches(LatentCaches):
    """A latent cache in fp8: what is listed was stored, so every step that lists reads it."""

    OPERATORS: ClassVar[Sequence[str]] = ("kv_cache_write", "mla_sparse")
    READS = staticmethod(read_from_cache)
    WRONG = CacheRun("scales of 1", {**ENGINE, **FORCED})
    RUNS = (WRONG, CacheRun("a scale for each layer", EXTENDED, SCALES))

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return sparse(tmp_path_factory.mktemp("sparse") / "whole")

    def test_lists_alone_are_read_where_that_is_asked(
        self, run: CacheRun, served: Callable[[CacheRun], Served]
    ) -> None:
        counts: Any = served(run).reports[0]["counts"]
        assert {key for key in counts if key.startswith(("mla_decode", "mla_prefill"))} == set()


def test_index_keys_with_a_weight_that_vllm_would_load_as_if_it_were_plain_are_refused(
    host: Host, tmp_path: Path
) -> None:
    scheme = SCHEMES["compressed-tensors W8A8 int8"]
    written = checkpoints.write_checkpoint(tmp_path / "quantized", scheme, model=sparse(tmp_path / "whole"))
    (started,) = host.serve(Engine(written, [Pass()]))
    said = r"index keys with such a quantized weight \(model.layers.0.self_attn.indexer.wk\) yet; leave 'indexer.wk'"
    with pytest.raises(AssertionError, match=said):
        started.result()
