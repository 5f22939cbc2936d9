"""LoRA under SGLang on a CPU: adapters give the tokens of the merged weights, alone and mixed in one batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import start

import variants
from adapters import AdaptersOfSGLang, Run, Wanted
from host_engines import Served
from running import MAX_TOKENS, PROMPTS, expected_tokens

pytest.importorskip("sglang")

from sglang_fl.layers import lora

BACKEND = {"lora_backend": "triton", "max_loras_per_batch": 3, "max_lora_rank": 8, "max_running_requests": 6}
"""A backend in Triton is replaced."""


@pytest.mark.engine
class TestAdapters(AdaptersOfSGLang):
    RUNS = (Run("triton", BACKEND),)
    OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")

    def test_another_backend_takes_the_place_of_one_in_triton(self, run: Run, served: Callable[[Run], Served]) -> None:
        said = "lora_backend: torch_native instead of triton, because the others are Triton kernels"
        assert said in served(run).log


def test_two_ranks_share_the_adapted_projections(
    checkpoint: Callable[[str], Path], adapter: Callable[[str], Path], adapted: Wanted
) -> None:
    paths = {name: str(adapter(name)) for name in ("one", "two", "late")}
    step = {"max_tokens": MAX_TOKENS, "prompts": PROMPTS, "lora": ["one", None, "late", "two"]}
    few = {"max_loras_per_batch": 2}  # so requests wait, and adapters leave for others
    got = start(checkpoint("qwen3"), step, engine={"lora_paths": paths, "tp_size": 2, **BACKEND, **few}).result()
    assert got["steps"][0]["tokens"] == [adapted(name)[place] for place, name in enumerate(step["lora"])]
    first, second = got["reports"]
    assert first["counts"] == second["counts"]
    assert first["native_layers"] == second["native_layers"] == {}


ADAPTED = {"target_modules": list(variants.ADAPTED), "bias": "none", "modules_to_save": None, "use_rslora": False}
"""PEFT's configuration of an adapter that is served."""


def validate(adapter: dict[str, Any], asked: list[Any]) -> None:
    manager: Any = SimpleNamespace(base_model=torch.nn.Module())
    config: Any = SimpleNamespace(hf_config=adapter)
    ref: Any = SimpleNamespace(lora_name="one")
    lora.validate_new_adapter(lambda *given: asked.append(given), manager, config, ref)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "'lm_head', which torch_native takes for a projection"),
        ({"target_modules": ["model.embed_tokens"]}, "'embed_tokens', which"),
        ({"target_modules": ["k_proj", "v_proj"]}, "k_proj, v_proj without q_proj, which SGLang merges"),
        ({"target_modules": ["q_proj"]}, "q_proj without v_proj"),
        ({"target_modules": ["up_proj", "down_proj"]}, "up_proj without gate_proj"),
        ({"use_rslora": True}, "use_rslora=True, which SGLang does not read"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern="),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"layers_to_transform": [0]}, "layers_to_transform="),
        ({"bias": "lora_only"}, "bias='lora_only'"),
    ],
)
def test_an_adapter_that_sglang_would_serve_wrongly_is_refused(changed: dict[str, Any], why: str) -> None:
    asked: list[Any] = []
    validate(ADAPTED, asked)
    validate({**ADAPTED, "target_modules": ["q_proj", "v_proj", "gate_proj"]}, asked)
    assert len(asked) == 2
    sentence = rf"sglang_fl does not support adapters with .*{re.escape(why)}.* \(adapter one\)"
    with pytest.raises(ValueError, match=sentence):
        validate({**ADAPTED, **changed}, asked)
    assert len(asked) == 2


def test_attention_of_a_model_with_experts_is_adapted(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("qwen3_moe")
    adapter = variants.adapter(
        model, tmp_path / "adapter", 1, tuple(name for name in variants.ADAPTED if "attn" in name)
    )
    step = {"max_tokens": MAX_TOKENS, "prompts": PROMPTS, "lora": ["one"] * len(PROMPTS)}
    got = start(model, step, engine={"lora_paths": {"one": str(adapter)}, **BACKEND}).result()
    assert got["steps"][0]["tokens"] == expected_tokens(variants.merged(model, adapter, tmp_path / "merged"))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_moe", r"adapters with experts \(SGLang multiplies their factors by Triton kernels alone"),
        ("deepseek_v32", "LoRA of latent attention on cpu"),
    ],
)
def test_layers_whose_adapters_are_triton_only_are_refused(
    family: str, said: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = variants.adapter(checkpoint(family), tmp_path / "adapter", 1)
    with pytest.raises(AssertionError, match=f"sglang_fl does not support {said}"):
        start(checkpoint(family), engine={"lora_paths": {"one": str(adapter)}, **BACKEND}).result()
