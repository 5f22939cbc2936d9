"""Attention gets a batch's lengths as integers of the host, and writes are told where no slot is to be skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Runs, ran, start
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_fl.attention.cache_slots import real, step
from vllm_fl.attention.metadata import AttentionFLMetadataBuilder, has_exact_host_lengths, host_lengths

HINTED = {
    "VLLM_FL_PLUGIN_MODULES": "hinted_plugin",
    "VLLM_FL_PER_OP": "paged_attention=impl:vendor.hinted;kv_cache_write=impl:vendor.hinted",
    "VLLM_FL_STRICT": "1",
}


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    return Runs({"hinted": start(checkpoint("qwen3"), variables=HINTED)})


@pytest.mark.engine
def test_what_every_step_says_of_its_tensors_is_true(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    """The implementation raises where a hint is wrong or missing, and nothing else may run."""
    result = results["hinted"]
    assert ran(result, "paged_attention") == ran(result, "kv_cache_write") == {"vendor.hinted"}
    assert result["steps"][0]["tokens"] == expected("qwen3")


def test_a_version_of_vllm_without_lengths_on_the_host_gives_none() -> None:
    assert host_lengths(SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 2]))) == (None, None)


def test_lengths_are_read_from_the_hosts_copies() -> None:
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    common = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 2, 3]), seq_lens_cpu_upper_bound=lengths)
    assert host_lengths(common) == ([0, 2, 3], [5, 9])


def test_a_batch_that_verifies_drafts_is_described_by_the_runners_own_tensors() -> None:
    """A captured graph reads them at their addresses; lengths on the host are bounds then, and are not told."""
    starts, lengths = torch.tensor([0, 4, 8, 8], dtype=torch.int32), torch.tensor([9, 30, 0], dtype=torch.int32)
    common: Any = SimpleNamespace(
        num_actual_tokens=12,  # the last request is padding
        max_query_len=4,
        max_seq_len=512,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=torch.zeros(3, 32, dtype=torch.int32),
        causal=True,
    )
    asked: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(), cache_config=SimpleNamespace(kv_sharing_fast_prefill=False)
    )
    builder = AttentionFLMetadataBuilder.__new__(AttentionFLMetadataBuilder)
    builder.encoder_only, builder.exact_host_lengths = False, has_exact_host_lengths(asked)
    builder.parallel = SimpleNamespace(decode_context_parallel_size=1)
    found = builder.build(0, common)
    assert found.seq_lens is lengths
    assert found.query_start_loc is starts
    assert found.block_table is common.block_table_tensor
    assert (found.max_query_len, found.max_seq_len, found.num_actual_tokens) == (4, 512, 12)
    assert found.seq_lens_host is found.query_start_loc_host is None
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


def test_behind_the_tokens_of_a_step_slots_are_padding() -> None:
    slots = torch.tensor([7, 8, -1, -1])
    with step(2):
        found, may_skip = real(slots)
    assert (found.tolist(), may_skip) == ([7, 8], False)


@pytest.mark.parametrize("tokens", [None, 0])
def test_of_a_batch_that_the_scheduler_has_not_made_nobody_knows(tokens: int | None) -> None:
    slots = torch.tensor([-1, -1])
    with nullcontext() if tokens is None else step(tokens):
        found, may_skip = real(slots)
    assert found is slots
    assert may_skip is None
