"""LoRA adapters beside quantized weights: each request gets its own adapter, and the dequantized network's products."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import answered, start

import quantized_checkpoints as checkpoints
import variants
from fl_dispatch.cli import small_model
from quantized_checkpoints import SCHEMES
from quantized_engines import FAMILIES
from quantized_network import adapted, computed, distance, network, scores
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

FEW = PROMPTS[:2]
NAMES = ("one", "two", None)


@pytest.mark.engine
@pytest.mark.parametrize("name", drawn(FAMILIES, 1, "quantized, adapters, SGLang"))
def test_each_request_has_its_own_adapter(name: str, tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(tmp_path / "checkpoint", SCHEMES[name])
    paths = {
        adapter: variants.adapter(small_model.CHECKPOINT, tmp_path / adapter, seed)
        for seed, adapter in enumerate(filter(None, NAMES))
    }
    prompts = [prompt for prompt in FEW for _ in NAMES]
    step = {"prompts": prompts, "max_tokens": MAX_TOKENS, "scores": True, "lora": NAMES * len(FEW)}
    served = {adapter: str(path) for adapter, path in paths.items()}
    engine = {"lora_paths": served, "max_loras_per_batch": 3, "max_lora_rank": 8, "max_running_requests": 6}
    got = start(folder, step, engine=engine).result()
    for number, adapter in enumerate(NAMES):
        answer = {key: got["steps"][0][key][number :: len(NAMES)] for key in ("tokens", "scores")}
        texts, found = answered(FEW, answer)
        right = computed(adapted(network(SCHEMES[name]), paths.get(adapter)), texts)
        assert distance(found, right.scores) <= right.rounding, adapter
        assert distance(found, scores(adapted(network(None), paths.get(adapter)), texts)) > right.rounding, adapter
        assert right.decides(FEW, MAX_TOKENS)
    assert {key.split(" ")[0] for key in got["report"]["counts"]} >= set(SCHEMES[name].operators)
    assert got["report"]["native_layers"] == {}
