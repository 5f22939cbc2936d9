"""In half types an engine is as close to float32 as Hugging Face is in the same type, with drafts and with adapters.

Teacher forced: the log-probabilities of every token of a prompt and its answer, by Hugging Face's network in float32
and in the half type, and by the engine. An adapter's network has the merged weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import STEP, answered, start
from torch import Tensor

import drafters
import variants
from fl_dispatch.cli.half_precision import LARGEST, MEAN, distances
from running import MAX_TOKENS, PROMPTS, reference_network
from sampling import drawn

WAYS = ("plain", "drafts", "adapters")
CASES = [(way, dtype) for way in WAYS for dtype in ("bfloat16", "float16")]
DRAWN = drawn(CASES, 2, "half types under SGLang")
each = pytest.mark.parametrize(("way", "dtype"), DRAWN)
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method", "SGLANG_FL_PREFER": "reference"}
WRONG = {"prefer": "reference", "per_op_order": {"rms_norm": ["impl:vendor.wrong"]}}

Run = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def adapted(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter, and the checkpoint that it is merged into."""
    folder = tmp_path_factory.mktemp("half")
    adapter = variants.adapter(checkpoint("qwen3"), folder / "adapter", 1)
    return adapter, variants.merged(checkpoint("qwen3"), adapter, folder / "merged")


@pytest.fixture(scope="module")
def result(
    checkpoint: Callable[[str], Path], adapted: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A way and a type → two passes over the prompts, with the log-probabilities of the first, and a wrong pass."""
    model, runs = checkpoint("qwen3"), {}
    drafter = drafters.noisy(model, tmp_path_factory.mktemp("drafter") / "noisy")
    engines: dict[str, dict[str, Any]] = {
        "plain": {},
        "drafts": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(drafter)},
        "adapters": {"lora_paths": {"one": str(adapted[0])}},
    }
    for way, dtype in DRAWN:
        step = {**STEP, "scores": True, **({"lora": ["one"] * len(PROMPTS)} if way == "adapters" else {})}
        wrong, engine = {**step, "policy": WRONG}, {**engines[way], "dtype": dtype}
        runs[way, dtype] = start(model, step, step, wrong, variables=PLUGINS, engine=engine)
    return lambda way, dtype: runs[way, dtype].result()


@pytest.fixture(scope="module")
def network(checkpoint: Callable[[str], Path], adapted: tuple[Path, Path]) -> Callable[[str, torch.dtype], Any]:
    """A way and a type → Hugging Face's network."""
    return cache(lambda way, dtype: reference_network(adapted[1] if way == "adapters" else checkpoint("qwen3"), dtype))


def _scores(network: Any, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of every token after the first of each text, and of the best tokens in their places."""
    found, best = [], []
    with torch.no_grad():
        for text in texts:
            rows = network(torch.tensor([text])).logits[0, :-1].float().log_softmax(-1)
            found.append(rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0])
            best.append(rows.amax(1))
    return torch.cat(found), torch.cat(best)


@each
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    way: str, dtype: str, result: Run, network: Callable[[str, torch.dtype], Any]
) -> None:
    texts, got = answered(PROMPTS, result(way, dtype)["steps"][0])
    exact, _ = _scores(network(way, torch.float32), texts)
    half, _ = _scores(network(way, getattr(torch, dtype)), texts)
    mean, largest = distances(got[:, None], exact[:, None], half[:, None])
    assert mean <= MEAN
    assert largest <= LARGEST


@each
def test_every_token_is_the_best_one_but_for_rounding(
    way: str, dtype: str, result: Run, network: Callable[[str, torch.dtype], Any]
) -> None:
    """A token that rounding has chosen is less likely by two errors at most, its own and that of the best one."""
    for step in result(way, dtype)["steps"][:2]:
        texts, _ = answered(PROMPTS, step)
        chosen, best = _scores(network(way, torch.float32), texts)
        half, _ = _scores(network(way, getattr(torch, dtype)), texts)
        answers = [less[-MAX_TOKENS:] for less in (best - chosen).split([len(text) - 1 for text in texts])]
        assert torch.cat(answers).max() <= 2 * LARGEST * (half - chosen).abs().max()


@pytest.mark.parametrize("dtype", [dtype for way, dtype in DRAWN if way == "drafts"])
def test_drafts_are_right_at_times(dtype: str, result: Run) -> None:
    drafts = result("drafts", dtype)["steps"][0]["drafts"]
    checked, right = (sum(pair[part] for pair in drafts) for part in (0, 1))
    assert right > checked / 4


@each
def test_a_wrong_norm_is_noticed(way: str, dtype: str, result: Run, network: Callable[[str, torch.dtype], Any]) -> None:
    texts, got = answered(PROMPTS, result(way, dtype)["steps"][2])
    exact, _ = _scores(network(way, torch.float32), texts)
    half, _ = _scores(network(way, getattr(torch, dtype)), texts)
    mean, _ = distances(got[:, None], exact[:, None], half[:, None])
    assert mean > MEAN


@each
def test_every_layer_is_ours(way: str, dtype: str, result: Run) -> None:
    report = result(way, dtype)["report"]
    assert report["native_layers"] == report["undispatched"] == report["failed"] == report["fallen_through"] == {}
