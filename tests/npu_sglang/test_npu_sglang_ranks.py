"""SGLang in two ranks on ``npu:0`` and ``npu:1``, which communicate through the stand-in for FlagCX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import run

from fl_dispatch.cli.checkpoints import build_checkpoint
from half_on_npu import SIZES, clear_tokens
from running import MAX_TOKENS, PROMPTS

STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("npu") / "qwen3", **SIZES["qwen3"])


@pytest.fixture(scope="module")
def result(model: Path, standin: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A right pass, and one while sums lack the second rank's part."""
    fault = str(tmp_path_factory.mktemp("fault") / "sums are wrong")
    engine = {"dtype": "float16", "tp_size": 2}
    variables = {
        "FLAGCX_PATH": str(standin("ASCEND")),
        "FLAGCX_STANDIN_WRONG": fault,
        "EMU_NPUS": "2",
        "SGLANG_FL_PREFER": "vendor",
    }
    return run(model, [STEP, {**STEP, "while": fault}], engine, **variables)


def test_two_ranks_that_communicate_through_flagcx_give_hugging_faces_tokens(
    model: Path, result: Mapping[str, Any]
) -> None:
    clear = clear_tokens(model, PROMPTS, MAX_TOKENS, "float16")
    assert sum(map(len, clear)) >= 24
    found = result["steps"][0]["tokens"]
    assert [tokens[: len(decided)] for tokens, decided in zip(found, clear, strict=True)] == clear


def test_both_ranks_count_the_same_collectives_and_every_operator_is_the_vendors(result: Mapping[str, Any]) -> None:
    first, second = result["reports"]
    assert len({first["pid"], second["pid"], result["pid"]}) == 3
    assert first["communication"]["tp:0"] == second["communication"]["tp:0"]
    assert first["communication"]["tp:0"]["all_reduce"] > 0
    assert "communication runs through FlagCX, version code 12345" in result["log"]
    for report in (first, second):
        assert {key.split(" ")[1] for key in report["counts"]} == {"vendor.ascend"}
        assert (report["native_layers"], report["failed"]) == ({}, {})


def test_sums_without_one_ranks_part_change_the_tokens(result: Mapping[str, Any]) -> None:
    right, wrong = result["steps"]
    assert wrong["cached"] == [0] * len(PROMPTS)
    assert wrong["tokens"] != right["tokens"]
