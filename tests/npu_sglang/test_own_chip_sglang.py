"""A package that ``fl new-backend NAME --device npu`` wrote serves under SGLang: chip, kernels and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import run

from own_chip import KERNELS, make_package
from running import MAX_TOKENS, PROMPTS

STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    package = make_package(tmp_path_factory.mktemp("own"))
    return run(checkpoint("qwen3"), [STEP, STEP], {"dtype": "float32"}, [package])


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
