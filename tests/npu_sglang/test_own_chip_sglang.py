"""A package that ``fl new-backend NAME --device npu`` wrote serves under SGLang: chip, kernels and defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from own_chip import KERNELS, make_package
from processes import finish
from running import MAX_TOKENS, PROMPTS

HERE = Path(__file__).parent
STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    package = make_package(tmp_path_factory.mktemp("own"))
    prefixes = ("VLLM_", "SGLANG_", "FLAG", "USE_FLAG", "EMU_")
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(prefixes)},
        "PYTHONPATH": os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", "")))),
        "EMU_NPU_BYTES": str(16 << 30),  # SGLang leaves some gigabytes free
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    engine = {
        "model_path": str(checkpoint("qwen3")),
        "dtype": "float32",
        "context_length": 512,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "chunked_prefill_size": 128,
        "mem_fraction_static": 0.8,
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "log_level": "info",
    }
    return finish(HERE / "run_npu_sglang.py", {"engine": engine, "steps": [STEP, STEP]}, variables)


def test_tokens_equal_hugging_face_also_from_the_radix_cache(
    result: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert [step["tokens"] for step in result["steps"]] == [expected("qwen3")] * 2
    assert sum(result["steps"][1]["cached"]) > 0


def test_its_kernels_ran_and_no_other_vendors(result: Mapping[str, Any]) -> None:
    report = result["report"]
    ran = {tuple(key.split(" ")) for key in report["counts"]}
    assert {pair for pair in ran if pair[0] in KERNELS} == {(operator, "vendor.nimbus") for operator in KERNELS}
    assert not any("ascend" in impl_id for _, impl_id in ran)
    assert (report["native_layers"], report["failed"]) == ({}, {})


def test_its_defaults_are_in_force(result: Mapping[str, Any]) -> None:
    assert "nimbus.yaml" in str(result["report"])
