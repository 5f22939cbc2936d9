"""vLLM's Triton kernels behind our operators of state spaces: right in the interpreter, and found without an import.

On a GPU ``tests/gpu/kernels/test_state_space_vendor_gpu.py`` runs them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import HERE, environment

import processes
from fl_dispatch.backends.vendor.cuda import library
from fl_dispatch.backends.vendor.cuda.impl import state_space
from host_files import HOSTS, UNPACKED

ROUNDINGS = {"selective_scan": 4.0, "selective_state_update": 1.0}
"""Shares of the tolerance: the kernel for prompts rounds the state and decayed tokens to a half type."""
DECLINED = {
    "Mamba: a decay for each column",
    "decays of columns, head size 3, 2 groups",
    "empty batch",
    "neither d nor a bias",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("operator", ROUNDINGS)
def test_what_is_not_declined_agrees_with_the_reference_and_so_do_the_states(operator: str) -> None:
    answer = processes.finish(HERE / "run_vendor_state_space.py", {"operator": operator}, environment(), True)
    found: dict[str, Any] = answer["found"]
    declined = {label for label, shares in found.items() if isinstance(shares, str)}
    assert declined <= DECLINED
    assert "empty batch" in declined
    compared = {label: shares for label, shares in found.items() if label not in declined}
    assert len(compared) >= 6
    assert {label: shares for label, shares in compared.items() if max(shares) > ROUNDINGS[operator]} == {}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_vllms_kernels_are_compiled_at_the_start_for_every_batch() -> None:
    job = {"keys": {"tokens": 2048, "requests": 256}}
    answer = processes.finish(HERE / "run_vendor_state_space.py", job, environment(), True)
    assert answer["late"] == []
    assert answer["kernels"] > 1


def test_chunks_have_tokens_of_one_sequence_and_those_behind_are_empty() -> None:
    starts = torch.tensor([0, 0, 5, 21, 21, 30], dtype=torch.int32)
    bounds, last, sequence = state_space.chunks(starts, 33, chunk=8)
    assert bounds.tolist() == [0, 5, 13, 21, 29, 30, 30, 30, 30, 30]
    assert sequence.tolist() == [1, 2, 2, 4, 4, 4, 4, 4, 4]
    assert last.tolist() == [-1, 0, 2, 2, 4]
    assert {tensor.dtype for tensor in (bounds, last, sequence)} == {torch.int32}


@pytest.mark.parametrize("version", ["", "0.33"])
def test_vllm_has_the_functions_with_the_arguments_that_calls_give(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        folder = HOSTS / f"vllm-{UNPACKED[version]}" / "vllm"
        if not folder.exists():
            pytest.skip(f"vLLM {version} is not unpacked: make hosts")
        monkeypatch.setattr(library, "_folder", lambda package: folder)
    assert [library._why_other(one) for one in library.STATE_SPACES] == ["", ""]


def test_a_function_that_moved_or_takes_others_is_named() -> None:
    update, _ = library.STATE_SPACES
    assert library._why_other(replace(update, arguments=("state", "pad_slot"))).endswith("takes no pad_slot")
    assert library._why_other(replace(update, name="no_such")).endswith("mamba_ssm.py has no no_such")
    assert "has no nowhere.py" in library._why_other(replace(update, file="nowhere.py"))
    assert library._why_other(replace(update, package="no_such_package")) == "no_such_package is not installed"
