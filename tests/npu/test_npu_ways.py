"""Other ways of running a real vLLM engine on the emulated NPU: compiled, with graphs, in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chip_engines import LLAMA, SPAWNED, STEP, counts, start

from half_on_npu import DTYPES, as_near_as_hugging_face
from processes import Runs
from running import PROMPTS
from sampling import drawn

FAMILY = "qwen3"
CAPTURED = (1, 2, 4, 8)
"""Sizes of batches, in tokens, that have graphs."""
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "as it starts": {"enforce_eager": False},
    "compiled": {
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "backend": "eager", "cudagraph_mode": "NONE"},
    },
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": list(CAPTURED)},
    },
}
SEVERAL: Mapping[str, Mapping[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
"""Engines of two devices in spawned processes; a commit draws one of them."""
DRAWN = drawn([*SEVERAL], 1, "several NPUs")


@pytest.fixture(scope="module")
def results(
    chip_checkpoint: Callable[[str], Path], npu_environment: Callable[..., dict[str, str]]
) -> Mapping[str, Any]:
    """Two passes of each engine; the second reads the prefix cache."""

    def run(engine: Mapping[str, Any], **variables: str) -> Any:
        return start(chip_checkpoint(FAMILY), DTYPES[FAMILY], [STEP, STEP], npu_environment(**variables), **engine)

    several = {name: run(SEVERAL[name], **SPAWNED) for name in DRAWN}
    return Runs({**several, **{name: run(engine) for name, engine in ENGINES.items()}})


@pytest.mark.parametrize("way", [*ENGINES, *DRAWN])
def test_other_ways_of_running_give_the_same(
    way: str, results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path]
) -> None:
    for step in results[way]["steps"]:
        assert as_near_as_hugging_face(FAMILY, chip_checkpoint(FAMILY), PROMPTS, step, DTYPES[FAMILY])
    for report in results[way]["reports"]:
        assert counts(report) == {operator: {"vendor.ascend"} for operator in LLAMA}
        assert (report["native_layers"], report["failed"]) == ({}, {})


@pytest.mark.parametrize("way", DRAWN)
def test_two_processes_are_spawned_and_meet_over_the_stand_in_for_hccl(way: str, results: Mapping[str, Any]) -> None:
    first, second = results[way]["reports"]
    assert len({first["pid"], second["pid"], results[way]["pid"]}) == 3
    if way == "two ranks":
        assert first["counts"] == second["counts"]
        assert first["communication"]["tp:0"]["all_reduce"] > 0


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_pieces_are_captured_for_each_size_and_replayed_while_the_engine_serves(results: Mapping[str, Any]) -> None:
    """Attention, and the write to its cache before it, are between the pieces."""
    first, second = (step["graphs"] for step in results["graphs"]["steps"])
    compiled = results["graphs"]["report"]["compiled"]
    assert (compiled["mode"], compiled["backend"]) == ("VLLM_COMPILE", "eager")
    assert first["captured"] == second["captured"] == len(CAPTURED) * compiled["pieces"]
    assert 0 < first["replayed"] < second["replayed"]
    assert first["replayed"] % compiled["pieces"] == 0


def test_without_being_asked_for_no_graph_is_captured(results: Mapping[str, Any]) -> None:
    """Nobody has seen one on a chip."""
    for way in ("as it starts", "compiled"):
        assert results[way]["steps"][-1]["graphs"] == {"captured": 0, "replayed": 0}
