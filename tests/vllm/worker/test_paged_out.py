"""Engines whose plain weights are on a disk answer as ever, whoever reads or writes the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, Runs, expected_tokens, start_features

import variants
from fl_dispatch.backends.vendor.cpu.impl import linear
from fl_dispatch.cli.checkpoints import build_checkpoint

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, **HEADS}
"""So wide that each product's weight takes a MiB or more."""
GENERATE = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
AGAIN = {"do": "reset_prefix_cache"}
PACKED = "linear=impl:vendor.cpu.onednn"
"""An order in which products have packed weights; the default has one only where plain weights are slower."""
REFERENCE = {"do": "policy", "prefer": "reference", "per_op_order": {"linear": ["reference"]}}
WEIGHTS = 22 << 20
"""Most of the 28 MiB that the products' weights take in float32: the heap may have had place for some."""

pytestmark = pytest.mark.skipif(bool(why := linear.why_no_onednn()), reason=why or "-")


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    model = build_checkpoint("qwen3", place / "model", **WIDE)
    adapter = variants.adapter(model, place / "adapter", seed=1)
    return {
        "model": model,
        "other": variants.other_weights(model, place / "other"),
        "adapter": adapter,
        "merged": variants.merged(model, adapter, place / "merged"),
    }


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> Callable[[str], list[list[int]]]:
    return lambda name: expected_tokens(models[name])


@pytest.fixture(scope="module")
def results(models: dict[str, Path], folder: Path) -> Runs:
    model, moved = models["model"], {"do": "moved", "folder": str(folder)}
    sleeping = [
        *(moved, GENERATE, AGAIN, moved),
        *({"do": "sleep", "level": 1}, {"do": "wake_up"}, GENERATE, moved),
        *({"do": "sleep", "level": 2}, {"do": "wake_up", "tags": ["weights"]}),
        *({"do": "rpc", "method": "reload_weights", "args": []}, {"do": "wake_up", "tags": ["kv_cache"]}),
        *(GENERATE, moved, AGAIN, REFERENCE, GENERATE, moved),
    ]
    send = {"do": "transfer", "backend": "fl_shm", "folders": [str(models["other"])], "info": {"chunk": 50_000}}
    updated = [moved, GENERATE, send, moved, GENERATE]
    adapted = [moved, {**GENERATE, "lora": [str(models["adapter"])] * len(PROMPTS)}, moved, GENERATE]
    jobs = {
        "sleeping": (model, sleeping, {"enable_sleep_mode": True}),
        "updated": (model, updated, {"weight_transfer_config": {"backend": "fl_shm"}, "enforce_eager": False}),
        "adapted": (model, adapted, {"enable_lora": True, "max_lora_rank": 8}),
    }
    variables = {"VLLM_FL_PAGE_OUT": str(folder), "VLLM_FL_PER_OP": PACKED}
    return Runs({name: start_features(job, cold=True, **variables) for name, job in jobs.items()})


@pytest.fixture(scope="module")
def steps(results: Runs) -> Callable[[str], list[Any]]:
    return lambda name: results[name]["runs"][0]["steps"]


def is_away(moved: dict[str, int]) -> None:
    """Check that the plain weights are on the disk, and that products did not read them back."""
    assert moved["mapped"] > WEIGHTS
    assert moved["resident"] < WEIGHTS // 20


def test_an_engine_answers_from_packed_weights_alone(steps: Any, wanted: Any) -> None:
    before, generated, _, after, *_ = steps("sleeping")
    assert _tokens(generated) == wanted("model")
    for moved in (before, after):
        is_away(moved)


def test_tokens_are_equal_after_sleep(steps: Any, wanted: Any) -> None:
    lightly, deeply = steps("sleeping")[6:8], steps("sleeping")[12:14]
    for generated, moved in (lightly, deeply):
        assert _tokens(generated) == wanted("model")
        is_away(moved)


def test_a_reference_reads_the_plain_weights_back(steps: Any, wanted: Any) -> None:
    *_, generated, moved = steps("sleeping")
    assert _tokens(generated) == wanted("model")
    assert moved["resident"] > WEIGHTS // 2


def test_a_trainers_weights_reach_a_compiled_model_and_move_to_the_disk_again(steps: Any, wanted: Any) -> None:
    first, before, _, second, after = steps("updated")
    assert _tokens(before) == wanted("model")
    assert _tokens(after) == wanted("other") != wanted("model")
    for moved in (first, second):
        is_away(moved)


def test_adapters_are_added_to_packed_weights(steps: Any, wanted: Any) -> None:
    first, adapted, second, plain = steps("adapted")
    assert _tokens(adapted) == wanted("merged") != wanted("model")
    assert _tokens(plain) == wanted("model")
    for moved in (first, second):
        is_away(moved)


def test_a_folder_in_main_memory_ends_the_start(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(Exception, match="VLLM_FL_PAGE_OUT: /dev/shm is in main memory"):
        start_features((checkpoint("qwen3"), [], {}), cold=True, VLLM_FL_PAGE_OUT="/dev/shm").result()
