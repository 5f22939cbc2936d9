"""Ranks that chose different implementations refuse to serve; ``test_processes`` has those that chose alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import start, start_data_parallel

ONE_FAILS = {
    "VLLM_FL_PLUGIN_MODULES": "divergent_plugin",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:divergent|reference",
}
REFUSAL = "the ranks chose different implementations"


def test_tensor_parallel_ranks_of_which_one_failed_refuse_to_serve(checkpoint: Callable[[str], Path]) -> None:
    engine = {"tensor_parallel_size": 2}
    with pytest.raises(AssertionError, match=REFUSAL) as caught:
        start(checkpoint("llama"), engine=engine, variables=ONE_FAILS).result()
    assert "silu_and_mul failed: [None, ['vendor.divergent']] on ranks [0, 1]" in str(caught.value)


def test_data_parallel_ranks_that_share_experts_and_of_which_one_failed_refuse_to_serve(
    checkpoint: Callable[[str], Path],
) -> None:
    with pytest.raises(AssertionError, match=REFUSAL) as caught:
        start_data_parallel(checkpoint("deepseek_v3"), variables=ONE_FAILS, enable_expert_parallel=True).result()
    assert "silu_and_mul failed: [None, ['vendor.divergent']] on ranks [0, 1]" in str(caught.value)


def test_pipeline_stages_of_which_one_has_another_implementation_refuse_to_serve(
    checkpoint: Callable[[str], Path],
) -> None:
    engine = {"pipeline_parallel_size": 2}
    variables = {"VLLM_FL_PLUGIN_MODULES": "uneven_plugin", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    variables["VLLM_FL_DENY_VENDORS"] = "cpu"  # so that both wheels choose alike
    with pytest.raises(AssertionError, match=REFUSAL) as caught:
        start(checkpoint("llama"), engine=engine, variables=variables).result()
    chosen = "silu_and_mul: [[['reference.torch']], [['vendor.uneven', 'reference.torch']]] on ranks [0, 1]"
    assert chosen in str(caught.value)
