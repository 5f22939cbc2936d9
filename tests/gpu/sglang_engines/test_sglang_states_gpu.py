"""Layers with a state in SGLang on a GPU: Hugging Face's tokens, eagerly and from graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sglang_on_gpu import NEUTRAL, OURS, STEP, all_is_ours, replayed, start

from running import MAX_TOKENS, expected_tokens, ran
from states import OPERATORS, build

pytestmark = pytest.mark.gpu
_HEADS, _SIZES = ("linear_num_key_heads", "linear_num_value_heads"), ("linear_key_head_dim", "linear_value_head_dim")
SIZES: Mapping[str, Mapping[str, int]] = {
    name: {**dict.fromkeys(_HEADS, 4), **dict.fromkeys(_SIZES, 64)} for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
}
"""Sizes that SGLang's Triton kernels take: powers of two."""
ENGINE: Mapping[str, Any] = {"max_mamba_cache_size": 32}
WAYS: Mapping[str, Mapping[str, Any]] = {"graphs": ENGINE, "eager": {**ENGINE, "disable_cuda_graph": True}}
FURTHER: Mapping[str, Mapping[str, Any]] = {"nemotron_h": {"disable_flashinfer_autotune": True}}
"""Further arguments of a model's engine; otherwise SGLang imports FlashInfer for it."""
SERVED = list(OPERATORS)
CASES = [*((name, "graphs") for name in SERVED), ("qwen3_5", "eager"), ("granitemoehybrid", "eager")]


class Served(NamedTuple):
    """A model, the way that it runs, its checkpoint, and what its engine said, which got the same prompts twice."""

    name: str
    way: str
    model: Path
    found: dict[str, Any]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name, way = request.param
    model = build(name, tmp_path_factory.mktemp("states") / name, **SIZES.get(name, {}))
    return Served(
        name,
        way,
        model,
        start(model, STEP, STEP, engine={**WAYS[way], **FURTHER.get(name, {})}, variables=NEUTRAL).result(),
    )


def test_tokens_equal_hugging_faces_twice(served: Served) -> None:
    expected = expected_tokens(served.model)
    assert [step["tokens"] for step in served.found["steps"]] == [expected, expected]


def test_our_kernels_ran(served: Served) -> None:
    report = served.found["report"]
    for operator in OPERATORS[served.name]:
        if served.way == "graphs" and operator.endswith("_update"):  # a replay calls nothing
            assert "default.triton" in str(report["manifest"]["choices"][operator])
        else:
            assert ran(served.found, operator) == OURS
    assert all_is_ours(report)


def test_decoding_replays_graphs_if_they_are_allowed(served: Served) -> None:
    report = served.found["report"]
    if served.way == "eager":
        assert report["graphs"] is None
    else:
        assert replayed(report, 2 * (MAX_TOKENS - 1))
