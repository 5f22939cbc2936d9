"""``tools/matrix.py`` calls a cell equal only where the tokens are right on every rank and our layers ran."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOKENS = [[1, 2], [3, 4]]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
        return importlib.import_module("matrix")


def result(*tokens: Any, native: dict[str, int] | None = None, counts: dict[str, int] | None = None) -> dict[str, Any]:
    report = {"native_layers": native or {}, "counts": {"rms_norm reference.torch": 1} if counts is None else counts}
    return {"tokens": list(tokens), "reports": [report] * len(tokens)}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (result(TOKENS), "equal"),
        (result(TOKENS, TOKENS), "equal"),
        (result(TOKENS, [[1, 2], [3, 5]]), "**different**"),
        (result(TOKENS, native={"RMSNorm": 3}), "not ours"),
        (result(TOKENS, counts={}), "not ours"),
    ],
)
def test_a_cell_is_equal_only_where_every_rank_is_right_and_ours(
    found: dict[str, Any], state: str, matrix: ModuleType
) -> None:
    assert matrix.judge(found, "", TOKENS)[0] == state


def test_a_sentence_of_ours_is_a_refusal_also_in_the_log_of_a_child_process(matrix: ModuleType) -> None:
    error = {"error": "RuntimeError", "message": "Engine core initialization failed. See root cause above."}
    sentence = "vllm_fl does not support state-space layers on cpu yet"
    log = f"(EngineCore pid=7) ERROR 11-21 10:36:31 [core.py:3] ValueError: {sentence} (model /tmp/x/y)"
    assert matrix.judge(error, log, TOKENS) == ("refused", sentence)


def test_another_error_is_a_failure_with_its_cause(matrix: ModuleType) -> None:
    error = {"error": "RuntimeError", "message": "Engine core initialization failed. See root cause above."}
    log = "(EngineCore pid=7) ERROR 11-21 10:36:31 [core.py:3] KeyError: 'weight'"
    assert matrix.judge(error, log, TOKENS) == ("**failed**", "KeyError: 'weight'")


def test_a_cell_that_was_not_started_is_not_run(matrix: ModuleType) -> None:
    page = matrix.page([matrix.Cell("qwen3", "vllm", "TP 2", "refused", "because.")], "versions", 60)
    assert "| qwen3 | not run | refused (1) | not run |" in page
    assert "\n1. because.\n" in page
