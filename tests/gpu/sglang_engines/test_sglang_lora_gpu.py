"""LoRA in SGLang on a GPU, by its Triton kernels and from graphs: adapters give the tokens of the merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, OURS, all_is_ours, replayed, start
from test_sglang_lora import asked, merged  # noqa: F401  a fixture
from test_sglang_lora import test_adapters_and_none_mix_in_one_batch as mix
from test_sglang_lora import test_an_adapter_gives_the_tokens_of_the_merged_weights as give_merged
from test_sglang_lora import test_an_adapter_is_loaded_while_the_engine_serves as come_late

from running import MAX_TOKENS, ran

pytestmark = pytest.mark.gpu
BACKENDS = ("csgmv", "triton")
"""The first is SGLang's choice."""
EXACT = {**NEUTRAL, "TRITON_F32_DEFAULT": "ieee"}
"""SGLang's kernels would multiply float32 in TF32, and the merged weights are compared in float32."""
LIMITS = {"max_loras_per_batch": 3, "max_lora_rank": 16, "max_running_requests": 6}
each = pytest.mark.parametrize("backend", BACKENDS)
Merged = dict[str, tuple[Path, Any]]
Expected = Callable[[str], list[list[int]]]


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Path], merged: Merged) -> Callable[[str], dict[str, Any]]:  # noqa: F811
    paths, steps = asked(merged)
    runs = {}
    for backend in BACKENDS:
        engine = {"lora_paths": paths, "lora_backend": backend, **LIMITS}
        runs[backend] = start(checkpoint("qwen3"), *steps, engine=engine, variables=EXACT)
    return lambda backend: runs[backend].result()


@each
class TestAdapters:
    """The rules of the engine on a CPU."""

    def test_tokens_are_those_of_the_merged_weights(
        self,
        backend: str,
        answers: Callable[[str], dict[str, Any]],
        merged: Merged,  # noqa: F811
        expected: Expected,
    ) -> None:
        give_merged(answers(backend), merged, expected)
        mix(answers(backend), merged, expected)
        come_late(answers(backend), merged)

    def test_our_kernels_ran_and_graphs_held_them(self, backend: str, answers: Callable[[str], dict[str, Any]]) -> None:
        found = answers(backend)
        assert all(ran(found, operator) == OURS for operator in ("rms_norm", "paged_attention", "kv_cache_write"))
        assert all_is_ours(found["report"])
        assert replayed(found["report"], 3 * (MAX_TOKENS - 1))
