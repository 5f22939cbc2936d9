"""Sleep mode on a GPU: memory goes back and comes again under graphs that were captured before, and tokens stay.

So do those of adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, expected_tokens, start_features

import variants
from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
CACHE = 1 << 30
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
GENERATE = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
STEPS = [
    {"do": "replays"},
    GENERATE,
    {"do": "sleep", "level": 1},
    {"do": "wake_up"},
    GENERATE,
    {"do": "sleep", "level": 2},
    {"do": "wake_up", "tags": ["weights"]},
    {"do": "rpc", "method": "reload_weights", "args": []},
    {"do": "wake_up", "tags": ["kv_cache"]},
    GENERATE,
    {"do": "replays"},
]
SLEPT, WROTE = {1: 2, 2: 5}, (1, 4, 9)
"""Level → its step; the steps that write tokens."""
each_level = pytest.mark.parametrize("level", SLEPT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoints") / "qwen3")


@pytest.fixture(scope="module")
def steps(model: Path) -> list[Any]:
    engine = {"enable_sleep_mode": True, "kv_cache_memory_bytes": CACHE, "enforce_eager": False}
    started = start_features((model, STEPS, {"gpu_memory_utilization": 0.1, **engine}), **OURS)
    (run,) = started.result()["runs"]
    return list(run["steps"])


def test_tokens_are_hugging_faces_before_and_after(steps: list[Any], model: Path) -> None:
    expected = expected_tokens(model)
    for place in WROTE:
        assert [output["tokens"][0] for output in steps[place]] == expected, place


@each_level
def test_a_sleeping_engine_has_given_the_devices_memory_back(level: int, steps: list[Any]) -> None:
    before, after = steps[SLEPT[level]]["free"]
    assert after - before > 0.9 * CACHE


@each_level
def test_weights_are_kept_in_main_memory_at_level_1_only(level: int, steps: list[Any]) -> None:
    pools = steps[SLEPT[level]]["pools"]
    weights, cache = pools["weights"], pools["kv_cache"]
    assert weights["away"]
    assert cache["away"]
    assert cache["bytes"] > 0.9 * CACHE  # whole blocks
    assert cache["kept"] == 0
    assert weights["kept"] == (weights["bytes"] if level == 1 else 0)
    assert weights["bytes"] > 0


def test_graphs_from_before_are_replayed_afterwards(steps: list[Any]) -> None:
    assert ["model", "FULL", 4] in steps[-1]


def test_adapters_are_there_again_after_each_level(model: Path, tmp_path: Path) -> None:
    paths = [variants.adapter(model, tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2))]
    wanted = [expected_tokens(variants.merged(model, path, tmp_path / f"merged {path.name}")) for path in paths]
    one, two = map(str, paths)
    mixed = {**GENERATE, "prompts": PROMPTS * 3, "lora": [one, two, None] * len(PROMPTS)}
    asked = [mixed if step is GENERATE else step for step in STEPS]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = {"enable_sleep_mode": True, "kv_cache_memory_bytes": CACHE, "enforce_eager": False, **lora}
    started = start_features((model, asked, {"gpu_memory_utilization": 0.1, **engine}), **OURS)
    (run,) = started.result()["runs"]
    weights = [*wanted, expected_tokens(model)]
    for place in WROTE:
        tokens = [output["tokens"][0] for output in run["steps"][place]]
        assert tokens == [weights[index % 3][index % len(PROMPTS)] for index in range(len(tokens))], place
    for level, place in SLEPT.items():
        kept = run["steps"][place]["pools"]["runtime"]
        assert kept["away"], level
        assert kept["kept"] == kept["bytes"] > 0, level
