"""The perplexity of held-out text on a GPU: Hugging Face's, with our kernels, the vendor's and the references."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import ran, start_features

import scoring
from fl_dispatch.cli import small_model
from fl_dispatch.evidence.perplexity import TOLERANCE

pytestmark = pytest.mark.gpu
DTYPES = ("float32", "float16", "bfloat16")
CHOICES = {
    "ours": {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"},
    "as shipped": {},
    "references": {"VLLM_FL_PREFER": "reference"},
}
"""Name → variables of the engines."""


@pytest.fixture(scope="module")
def result() -> Callable[[str, str], dict[str, Any]]:
    """Choice and dtype → what that engine answered: right, and then with a norm that is slightly wrong."""

    @cache
    def of(choice: str) -> dict[str, Any]:
        steps = [scoring.step(), {"do": "policy", **scoring.SLIGHTLY_WRONG}, scoring.step()]
        memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
        engine = {**memory, "max_num_batched_tokens": 1024, "enable_prefix_caching": False}
        runs = [(small_model.CHECKPOINT, steps, {**engine, "dtype": dtype}) for dtype in DTYPES]
        return start_features(*runs, VLLM_FL_PLUGIN_MODULES="sample_variance", **CHOICES[choice]).result()

    return lambda choice, dtype: of(choice)["runs"][DTYPES.index(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_the_perplexity_is_hugging_faces(choice: str, dtype: str, result: Callable[[str, str], dict[str, Any]]) -> None:
    answered = result(choice, dtype)
    assert scoring.difference(answered["steps"][0]) <= TOLERANCE[dtype]
    assert answered["report"]["failed"] == {}


def test_our_kernels_ran(result: Callable[[str, str], dict[str, Any]]) -> None:
    answered = result("ours", "bfloat16")
    for operator in ("silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"):
        assert ran(answered, operator) == {"default.triton"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_slightly_wrong_is_noticed(dtype: str, result: Callable[[str, str], dict[str, Any]]) -> None:
    assert scoring.difference(result("ours", dtype)["steps"][2]) > 2 * TOLERANCE[dtype]
