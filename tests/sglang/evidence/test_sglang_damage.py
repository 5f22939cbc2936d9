"""In SGLang a request with NaN in its logits ends alone, with its origin, and nothing of it is remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from serving import start

from running import PROMPTS

pytestmark = pytest.mark.engine

POISON = 450
"""A token of no prompt and of no right answer."""
COMMON = PROMPTS[2][:48]
POISONED = [*COMMON, POISON, *PROMPTS[1]]
INNOCENT = [*COMMON, *PROMPTS[1]]
SAID = "its logits have NaN or infinity: they began in 'rms_norm' by 'vendor.poison' in model.layers.0.input_layernorm"


def variables(model: Path, folder: Path, **more: str) -> dict[str, str]:
    with safe_open(model / "model.safetensors", "pt") as tensors:
        torch.save(tensors.get_tensor("model.embed_tokens.weight")[POISON].float(), folder / "poison.pt")
    policy = {"VLLM_FL_PLUGIN_MODULES": "poisoned_norm", "VLLM_FL_PER_OP": "rms_norm=vendor:poison|reference"}
    return {**policy, "POISON": str(folder / "poison.pt"), **more}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(
    ranks: int, checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    model, right = checkpoint("qwen3"), expected("qwen3")
    steps = [{"prompts": each, "max_tokens": 16, "apart": True} for each in ([*PROMPTS[:2], POISONED], [POISONED])]
    fresh = {"prompts": [INNOCENT, PROMPTS[2]], "max_tokens": 16, "apart": True}
    given = variables(model, tmp_path)
    found = start(model, fresh, *steps, fresh, variables=given, engine={"tp_size": ranks}).result()
    before, first, second, after = (step["answers"] for step in found["steps"])
    assert first[:2] == right[:2]
    assert SAID in first[2]
    assert SAID in second[0]
    assert before == after
    assert after[1] == right[2]
