"""Attention gets a batch's lengths as integers of the host, once a step, from vLLM's own copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Runs, ran, start

from vllm_fl.attention import host_lengths

HINTED = {
    "VLLM_FL_PLUGIN_MODULES": "hinted_plugin",
    "VLLM_FL_PER_OP": "paged_attention=impl:vendor.hinted",
    "VLLM_FL_STRICT": "1",
}


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path]) -> Mapping[str, Any]:
    return Runs({"hinted": start(checkpoint("qwen3"), variables=HINTED)})


@pytest.mark.engine
def test_the_integers_of_every_step_are_the_numbers_in_the_tensors(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    """The implementation raises where they differ or are missing, and nothing else may run."""
    result = results["hinted"]
    assert ran(result, "paged_attention") == {"vendor.hinted"}
    assert result["steps"][0]["tokens"] == expected("qwen3")


def test_a_version_of_vllm_without_lengths_on_the_host_gives_none() -> None:
    assert host_lengths(SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 2]))) == (None, None)


def test_lengths_are_read_from_the_hosts_copies() -> None:
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    common = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 2, 3]), seq_lens_cpu_upper_bound=lengths)
    assert host_lengths(common) == ([0, 2, 3], [5, 9])
