"""LoRA adapters beside quantized weights: each request gets its own adapter, and the dequantized network's products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, ran, start_features

import quantized_checkpoints as checkpoints
import variants
from fl_dispatch.cli import small_model
from quantized_engines import FAMILIES, Run
from quantized_network import adapted, answered, computed, distance, network, scores
from sampling import drawn

pytestmark = pytest.mark.engine
FEW = PROMPTS[:2]
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_num_seqs": 6}
WAYS = {"eager": {}, "compiled": {"enforce_eager": False}}
RUNS = drawn(
    [Run(name, {**LORA, **how}, kind) for name in FAMILIES for kind, how in WAYS.items()], 1, "quantized, adapters"
)
each_run = pytest.mark.parametrize("run", RUNS, ids=str)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path | None]:
    """Two, and none."""
    folder = tmp_path_factory.mktemp("adapters")
    return [*(variants.adapter(small_model.CHECKPOINT, folder / str(seed), seed) for seed in (1, 2)), None]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, adapters: list[Path | None]) -> dict[Run, Any]:
    folder = tmp_path_factory.mktemp("quantized")
    asked = {
        "do": "generate",
        "prompts": [prompt for prompt in FEW for _ in adapters],
        "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0, "prompt_logprobs": 0},
        "lora": [path and str(path) for path in adapters] * len(FEW),
    }
    written = {name: folder / name.replace(" ", "-") for name in {run.scheme for run in RUNS}}
    for name, place in written.items():
        checkpoints.write_checkpoint(place, checkpoints.SCHEMES[name])
    found = start_features(*((written[run.scheme], [asked], run.engine) for run in RUNS)).result()
    return dict(zip(RUNS, found["runs"], strict=True))


@each_run
@pytest.mark.parametrize("number", range(3), ids=("one", "two", "none"))
def test_each_request_has_its_own_adapter(
    run: Run, number: int, answers: dict[Run, Any], adapters: list[Path | None]
) -> None:
    texts, got = answered(FEW, answers[run]["steps"][0][number :: len(adapters)])
    right = computed(adapted(network(run.made), adapters[number]), texts)
    assert distance(got, right.scores) <= right.rounding
    assert distance(got, scores(adapted(network(None), adapters[number]), texts)) > right.rounding
    assert right.decides(FEW, MAX_TOKENS)


@each_run
def test_our_operators_compute_the_products_and_the_adapters(run: Run, answers: dict[Run, Any]) -> None:
    report = answers[run]["report"]
    assert report["failed"] == report["native_layers"] == {}
    assert report["layers"][run.made.layer] == 4 * 4
    assert all(ran(answers[run], operator) for operator in run.made.operators)
    if report["compiled"] is None:  # else the graph has the adapters' operators, whose calls nobody counts
        assert all(ran(answers[run], operator) for operator in ("lora_shrink", "lora_expand"))
    else:
        assert report["compiled"]["graphs"] + report["compiled"]["loaded"] >= 1
