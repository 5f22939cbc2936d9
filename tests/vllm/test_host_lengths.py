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

from vllm_fl.attention_metadata import host_lengths
from vllm_fl.slots import real, step

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
