"""A package that ``fl new-backend NAME --device npu`` wrote serves under vLLM: its chip, its kernels, its defaults.

The chip has a name of its own over the emulated runtime, and a priority above the built-in one's. In float32 the
package's kernels, which compute by PyTorch, give Hugging Face's tokens exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from own_chip import KERNELS, make_package
from processes import finish
from running import MAX_TOKENS, PROMPTS

SCRIPT = Path(__file__).with_name("run_npu_vllm.py")
WARNING = "device 'nimbus' was never verified under vLLM"


@pytest.fixture(scope="module")
def result(
    checkpoint: Callable[[str], Path],
    npu_environment: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Any]:
    """Two passes, and one with a wrong kernel of the package's file."""
    package = make_package(tmp_path_factory.mktemp("own"))
    variables = npu_environment(PYTHONPATH=os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH")))))
    del variables["VLLM_FL_PREFER"]  # the package's own defaults say it
    engine = {
        "model": str(checkpoint("qwen3")),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "max_logprobs": 512,
    }
    step = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    right = finish(SCRIPT, {"engine": engine, "steps": [step, step]}, variables)
    kernels = package / "nimbus_fl/kernels.py"
    kernels.write_text(kernels.read_text().replace("functional.silu(gate) * up", "functional.silu(up) * gate"))
    return {**right, "wrong": finish(SCRIPT, {"engine": engine, "steps": [step]}, variables)}


def test_tokens_equal_hugging_face_also_from_the_prefix_cache(
    result: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert [step["tokens"] for step in result["steps"]] == [expected("qwen3")] * 2


def test_its_kernels_ran_and_no_other_vendors(result: Mapping[str, Any]) -> None:
    report = result["report"]
    ran = {tuple(key.split(" ")) for key in report["counts"]}
    assert {(operator, "vendor.nimbus") for operator in KERNELS} == {pair for pair in ran if pair[0] in KERNELS}
    assert not any("ascend" in impl_id for _, impl_id in ran)
    assert (report["native_layers"], report["failed"]) == ({}, {})


def test_a_mistake_in_its_file_of_kernels_changes_the_tokens(
    result: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["wrong"]["steps"][0]["tokens"] != expected("qwen3")


def test_its_defaults_are_in_force(result: Mapping[str, Any]) -> None:
    assert "nimbus.yaml" in str(result["report"])


def test_one_warning_says_that_nobody_verified_it(result: Mapping[str, Any]) -> None:
    assert result["log"].count(WARNING) == 1
