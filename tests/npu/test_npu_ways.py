"""Other ways of running a real vLLM engine on the emulated NPU: compiled, graphs, several processes, adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chip_engines import LLAMA, SPAWNED, STEP, counts, start

import variants
from half_on_npu import DTYPES, as_near_as_hugging_face, clear_tokens
from processes import Runs
from running import MAX_TOKENS, PROMPTS
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
"""Engines of two devices in spawned processes."""
ADAPTERS, V1 = "adapters", "V1 runner"
SAMPLE = ["two ranks", *drawn(["two stages", ADAPTERS, V1], 1, "ways of running on the NPU")]
"""Those that this commit draws."""
several_processes = pytest.mark.parametrize("way", [way for way in SEVERAL if way in SAMPLE])


@pytest.fixture(scope="module")
def adapters(chip_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of all projections."""
    folder = tmp_path_factory.mktemp("adapters")
    return [variants.adapter(chip_checkpoint(FAMILY), folder / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def results(
    chip_checkpoint: Callable[[str], Path], npu_environment: Callable[..., dict[str, str]], adapters: list[Path]
) -> Mapping[str, Any]:
    """Two passes of each engine, the second from the prefix cache; graphs with adapters, which some prompts lack."""
    one, two = map(str, adapters)
    mixed = {**STEP, "adapters": [one, None, two, None]}

    def run(engine: Mapping[str, Any], *steps: Mapping[str, Any], **variables: str) -> Any:
        environment = npu_environment(**variables)
        return start(chip_checkpoint(FAMILY), DTYPES[FAMILY], list(steps), environment, **engine)

    runs = {name: run(engine, STEP, STEP, **SPAWNED) for name, engine in SEVERAL.items() if name in SAMPLE}
    runs |= {name: run(engine, STEP, STEP) for name, engine in ENGINES.items()}
    if V1 in SAMPLE:
        runs[V1] = run({}, STEP, STEP, VLLM_USE_V2_MODEL_RUNNER="0")
    if ADAPTERS in SAMPLE:
        runs[ADAPTERS] = run({**ENGINES["graphs"], "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, mixed)
    return Runs(runs)


@pytest.mark.parametrize("way", [*ENGINES, *(way for way in (*SEVERAL, V1) if way in SAMPLE)])
def test_other_ways_of_running_give_the_same(
    way: str, results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path]
) -> None:
    for step in results[way]["steps"]:
        assert as_near_as_hugging_face(FAMILY, chip_checkpoint(FAMILY), PROMPTS, step, DTYPES[FAMILY])
    for report in results[way]["reports"]:
        assert counts(report) == {operator: {"vendor.ascend"} for operator in LLAMA}
        assert (report["native_layers"], report["failed"]) == ({}, {})
        assert report["model_runner"] == ("V1" if way == V1 else "V2")


@several_processes
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


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(ADAPTERS not in SAMPLE, reason="this commit draws other ways of running")
def test_adapters_in_one_batch_give_the_tokens_of_their_merged_weights(
    results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path], adapters: list[Path], tmp_path: Path
) -> None:
    base = chip_checkpoint(FAMILY)
    one, two = (variants.merged(base, adapter, tmp_path / adapter.name) for adapter in adapters)
    (step,) = results[ADAPTERS]["steps"]
    compared = 0
    for model, prompt, tokens in zip((one, base, two, base), PROMPTS, step["tokens"], strict=True):
        (clear,) = clear_tokens(model, [prompt], MAX_TOKENS, DTYPES[FAMILY])
        assert tokens[: len(clear)] == clear
        compared += len(clear)
    assert compared >= 24
    assert counts(results[ADAPTERS]["report"]) == {operator: {"vendor.ascend"} for operator in LLAMA}
    assert step["graphs"]["replayed"] > 0
