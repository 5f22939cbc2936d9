"""The perplexity of held-out text is Hugging Face's, whatever implementation and dtype a real engine computes with.

One engine a dtype, which starts with the vendor's kernels where there are some, and scores the text under each policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import python, ran, start_features

import scoring
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import limits
from fl_dispatch.cli import small_model
from fl_dispatch.evidence.perplexity import TOLERANCE

pytestmark = pytest.mark.engine
POLICIES = ("vendor", "reference", "flagos")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def result() -> Callable[[str], dict[str, Any]]:
    """Dtype → what its engine answered: for each policy, then with a norm that is slightly wrong."""
    policies = [{"prefer": name} for name in POLICIES] + [scoring.SLIGHTLY_WRONG]
    steps = [step for policy in policies for step in ({"do": "policy", **policy}, scoring.step())]
    engine = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
    runs = [(small_model.CHECKPOINT, steps, {**engine, "dtype": dtype}) for dtype in DTYPES]
    future: Future[dict[str, Any]] = start_features(
        *runs, VLLM_FL_PREFER="vendor", VLLM_FL_PLUGIN_MODULES="sample_variance"
    )
    return cache(lambda dtype: future.result()["runs"][DTYPES.index(dtype)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_perplexity_is_hugging_faces_under_every_policy(
    policy: str, dtype: str, result: Callable[[str], dict[str, Any]]
) -> None:
    assert scoring.difference(result(dtype)["steps"][2 * POLICIES.index(policy) + 1]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_slightly_wrong_is_noticed(dtype: str, result: Callable[[str], dict[str, Any]]) -> None:
    assert scoring.difference(result(dtype)["steps"][-1]) > 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_policys_implementations_ran(dtype: str, result: Callable[[str], dict[str, Any]]) -> None:
    vendor = set() if library.why_unavailable() else {"vendor.cpu"}
    assert ran(result(dtype), "rms_norm") == {"reference.torch", "reference.sample_variance"} | vendor
    attention = vendor if vendor and limits.rounds(getattr(torch, dtype)) else {"vendor.cpu.cpp"}
    assert ran(result(dtype), "paged_attention") == {"reference.torch"} | attention
    assert result(dtype)["report"]["failed"] == {}


def test_the_command_ends_with_1_where_another_perplexity_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "perplexity.json"
    command = ["-c", "from fl_dispatch.cli import main; main()", "perplexity", "--host", "vllm", "--dtype", "bfloat16"]
    right = small_model.facts()["perplexity"]
    ended = python(*command, "--expect", str(1.01 * right), "--out", str(file))
    assert ended.returncode == 1, ended.log
    assert "WRONG" in ended.log
    found = json.loads(file.read_text())
    assert found["perplexity"] == pytest.approx(right, rel=TOLERANCE["bfloat16"])
    assert found["report"]["counts"]
