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
from running import MAX_TOKENS, PROMPTS, expected_tokens

pytest.importorskip("sglang")

from sglang_fl.layers import lora

ADAPTERS = {"one": 1, "two": 2, "late": 3}
"""Name → seed; the last is loaded while the engine serves."""
MIXED = ["one", "two", None]
BACKEND = {"lora_backend": "triton", "max_loras_per_batch": 3, "max_lora_rank": 8, "max_running_requests": 6}
"""A backend in Triton is replaced."""


@pytest.fixture(scope="module")
def merged(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Name → the adapter, and Hugging Face's tokens of the weights merged with it."""
    model, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("adapters")
    paths = {name: variants.adapter(model, folder / name, seed) for name, seed in ADAPTERS.items()}
    return {
        name: (path, expected_tokens(variants.merged(model, path, folder / f"merged {name}")))
        for name, path in paths.items()
    }


def asked(merged: dict[str, tuple[Path, Any]]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The adapters that an engine starts with; and steps: with one, with several and none, with one that comes late."""
    paths = {name: str(path) for name, (path, _) in merged.items()}
    late, step = paths.pop("late"), {"max_tokens": MAX_TOKENS}
    return paths, [
        {**step, "prompts": PROMPTS, "lora": ["one"] * len(PROMPTS)},
        {**step, "prompts": [prompt for prompt in PROMPTS for _ in MIXED], "lora": MIXED * len(PROMPTS)},
        {**step, "prompts": PROMPTS, "lora": ["late"] * len(PROMPTS), "load": ["late", late]},
    ]


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path], merged: dict[str, tuple[Path, Any]]) -> dict[str, Any]:
    paths, steps = asked(merged)
    return start(checkpoint("qwen3"), *steps, engine={"lora_paths": paths, **BACKEND}).result()


def test_an_adapter_gives_the_tokens_of_the_merged_weights(
    result: dict[str, Any], merged: dict[str, tuple[Path, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    assert result["steps"][0]["tokens"] == merged["one"][1]
    different = [expected("qwen3"), *(tokens for _, tokens in merged.values())]
    assert all(one != other for place, one in enumerate(different) for other in different[:place])


def test_adapters_and_none_mix_in_one_batch(
    result: dict[str, Any], merged: dict[str, tuple[Path, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    wanted = [expected("qwen3") if name is None else merged[name][1] for name in MIXED]
    assert result["steps"][1]["tokens"] == [tokens[place] for place in range(len(PROMPTS)) for tokens in wanted]
    assert max(map(int, re.findall(r"Prefill batch, #new-seq: (\d+)", result["log"]))) > 1


def test_two_ranks_share_the_adapted_projections(
    checkpoint: Callable[[str], Path],
    merged: dict[str, tuple[Path, Any]],
    expected: Callable[[str], list[list[int]]],
) -> None:
    paths = {name: str(path) for name, (path, _) in merged.items()}
    step = {"max_tokens": MAX_TOKENS, "prompts": PROMPTS, "lora": ["one", None, "late", "two"]}
    few = {"max_loras_per_batch": 2}  # so requests wait, and adapters leave for others
    got = start(checkpoint("qwen3"), step, engine={"lora_paths": paths, "tp_size": 2, **BACKEND, **few}).result()
    wanted = [expected("qwen3") if name is None else merged[name][1] for name in step["lora"]]
    assert got["steps"][0]["tokens"] == [tokens[place] for place, tokens in enumerate(wanted)]
    first, second = got["reports"]
    assert first["counts"] == second["counts"]
    assert first["native_layers"] == second["native_layers"] == {}


def test_an_adapter_is_loaded_while_the_engine_serves(
    result: dict[str, Any], merged: dict[str, tuple[Path, Any]]
) -> None:
    assert result["steps"][2]["tokens"] == merged["late"][1]


def test_our_operators_ran_around_the_adapted_projections(result: dict[str, Any]) -> None:
    operators = {key.split(" ")[0] for key in result["report"]["counts"]}
    assert {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"} <= operators
    assert "lora_backend: torch_native instead of triton, because the others are Triton kernels" in result["log"]


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
        ("deepseek_v3", "LoRA of latent attention on cpu"),
    ],
)
def test_layers_whose_adapters_are_triton_only_are_refused(
    family: str, said: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = variants.adapter(checkpoint(family), tmp_path / "adapter", 1)
    with pytest.raises(AssertionError, match=f"sglang_fl does not support {said}"):
        start(checkpoint(family), engine={"lora_paths": {"one": str(adapter)}, **BACKEND}).result()
