"""A latent cache in fp8 under SGLang: all tokens read all latents from it, because attention has one form here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from host_engines import Answer
from latent_cache import LatentCaches, Run, read_from_cache
from quantized_mixture import sparse

ONES = Run("scales of 1", {"kv_cache_dtype": "fp8_e4m3"})


@pytest.mark.engine
class TestSparseCaches(LatentCaches):
    RUNS = (ONES,)
    WRONG = ONES
    OPERATORS = ("kv_cache_write", "mla_sparse")
    READS = staticmethod(read_from_cache)

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return sparse(tmp_path_factory.mktemp("sparse") / "whole")


@pytest.mark.engine
class TestCaches(LatentCaches):
    RUNS = (ONES,)
    WRONG = ONES
    OPERATORS = ("kv_cache_write", "mla_decode")
    READS = staticmethod(read_from_cache)

    def test_a_prompt_found_in_the_cache_has_the_same_answer(self, passes: Callable[[Run], list[Answer]]) -> None:
        first, again = passes(ONES)[:2]
        assert again.tokens == first.tokens
