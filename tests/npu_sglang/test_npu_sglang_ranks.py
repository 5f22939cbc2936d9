"""SGLang in two ranks on ``npu:0`` and ``npu:1``, which communicate through the stand-in for FlagCX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import run

from fl_dispatch.cli.checkpoints import build_checkpoint
from flagcx_on_npu import check_fault, check_ranks, check_tokens, only_if_drawn, steps, variables
from half_on_npu import SIZES

pytestmark = only_if_drawn("SGLang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("npu") / "qwen3", **SIZES["qwen3"])


@pytest.fixture(scope="module")
def result(model: Path, standin: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    fault = tmp_path_factory.mktemp("fault") / "sums are wrong"
    engine = {"dtype": "float16", "tp_size": 2}
    return run(model, steps(fault), engine, cold=True, **variables(standin, fault), SGLANG_FL_PREFER="vendor")


def test_two_ranks_that_communicate_through_flagcx_give_hugging_faces_tokens(
    model: Path, result: Mapping[str, Any]
) -> None:
    check_tokens(model, result)


def test_both_ranks_count_the_same_collectives_and_every_operator_is_the_vendors(result: Mapping[str, Any]) -> None:
    check_ranks(result)


def test_sums_without_one_ranks_part_change_the_tokens(result: Mapping[str, Any]) -> None:
    check_fault(result)
