"""A real SGLang engine on ``npu:0``: its operators by ``vendor.ascend``, no documented rule of the chip waived.

One engine a family: two passes, the second from the radix cache, then one with each wrong kernel of the chip, and a
right one. How tokens are compared in half precision says :mod:`half_on_npu`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fl_dispatch.cli.checkpoints import build_checkpoint
from half_on_npu import SIZES, clear_tokens
from processes import Runs, finish, pool
from running import MAX_TOKENS, PROMPTS

HERE = Path(__file__).parent
FAMILIES = ("qwen3", "llama")
OPERATORS = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
KERNELS = (
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_fused_infer_attention_score",
)
PAGE = 128
STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → its checkpoint in the chip's sizes."""
    folder = tmp_path_factory.mktemp("npu")
    return cache(lambda family: build_checkpoint(family, folder / family, **SIZES[family]))


@pytest.fixture(scope="module")
def results(model: Callable[[str], Path]) -> Mapping[str, Any]:
    prefixes = ("VLLM_", "SGLANG_", "FLAG", "USE_FLAG", "EMU_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    variables = {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE / "plugins"), os.environ.get("PYTHONPATH", "")))),
        "SGLANG_FL_PLUGIN_MODULES": "wrong_kernels",
        "SGLANG_FL_PREFER": "vendor",
        "EMU_NPU_BYTES": str(16 << 30),  # SGLang leaves some gigabytes free
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

    def run(family: str, *wrong: str) -> Any:
        engine = {
            "model_path": str(model(family)),
            "dtype": "float16",
            "context_length": 512,
            "max_total_tokens": 4096,
            "max_running_requests": 4,
            "chunked_prefill_size": 128,
            "mem_fraction_static": 0.8,
            "disable_cuda_graph": True,
            "grammar_backend": "none",
            "log_level": "info",
        }
        steps = [STEP, STEP, *({**STEP, "wrong": kernel} for kernel in wrong)]
        return pool.submit(finish, HERE / "run_npu_sglang.py", {"engine": engine, "steps": steps}, variables)

    return Runs({"qwen3": run("qwen3", *KERNELS, ""), "llama": run("llama")})


def decided(tokens: list[list[int]], clear: list[list[int]]) -> list[list[int]]:
    """As many tokens of each prompt as Hugging Face decides clearly."""
    return [found[: len(expected)] for found, expected in zip(tokens, clear, strict=True)]


@each_family
def test_tokens_equal_hugging_faces_as_far_as_half_precision_decides_them(
    family: str, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    clear = clear_tokens(model(family), PROMPTS, MAX_TOKENS, "float16")
    assert sum(map(len, clear)) >= 24
    for step in results[family]["steps"][:2]:
        assert decided(step["tokens"], clear) == clear


@each_family
def test_the_second_pass_reads_the_radix_cache(family: str, results: Mapping[str, Any]) -> None:
    first, second = results[family]["steps"][:2]
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"] == [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]


@each_family
def test_every_operator_is_the_vendors(family: str, results: Mapping[str, Any]) -> None:
    report = results[family]["report"]
    ran = {tuple(key.split(" ")) for key in report["counts"]}
    assert {pair for pair in ran if pair[0] in OPERATORS} == {(operator, "vendor.ascend") for operator in OPERATORS}
    assert {impl_id for _, impl_id in ran} == {"vendor.ascend"}
    assert (report["native_layers"], report["failed"]) == ({}, {})


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_kernel_changes_the_tokens(kernel: str, results: Mapping[str, Any]) -> None:
    right, _, *others = results["qwen3"]["steps"]
    assert others[KERNELS.index(kernel)]["tokens"] != right["tokens"]


def test_with_right_kernels_the_same_engine_is_right_again(results: Mapping[str, Any]) -> None:
    assert results["qwen3"]["steps"][-1]["tokens"] == results["qwen3"]["steps"][0]["tokens"]
