"""A KV cache in fp8 in SGLang on a GPU, from graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, replayed

from host_engines import Served, ran
from quantized_cache import COMPRESSED, OPERATORS, PLAIN, QuantizedCaches, Run
from running import MAX_TOKENS


@pytest.mark.gpu
class TestCaches(QuantizedCaches):
    SINGLE = (
        Run("scales of 1, pages of 16", PLAIN, {"kv_cache_dtype": "fp8_e4m3", "page_size": 16}),
        Run("scales of a checkpoint", COMPRESSED, {}),
    )
    HALVES = ALONE = ()
    SAME = False

    def place(self, run: Run) -> Mapping[str, Any]:
        return {**NEUTRAL, "SGLANG_FL_PLUGIN_MODULES": ""}

    def test_our_kernels_ran_and_graphs_held_them(self, run: Run, served: Callable[[Run], Served]) -> None:
        (report,) = served(run).reports
        assert all(ran(report)[operator] == OURS for operator in OPERATORS)
        assert replayed(report, 2 * (MAX_TOKENS - 1))
