"""Every kind of rotation turns queries as Hugging Face does around each limit, or is limited in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import start_features
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

import positions
import rope_kinds
from fl_dispatch.hosting.positions import rotary_tables
from rope_kinds import KINDS, LENGTHS, LONGEST, SIZE, TRAINED
from sampling import drawn
from vllm_fl.layers import rotations

LONG = [kind for kind, stated in KINDS.items() if stated["rope_type"] == "longrope"]


def _vllm_config(kind: str, length: int = LONGEST, asked: int | None = None) -> Any:
    """The parts of vLLM's configuration that rotations read."""
    text = rope_kinds.config(kind)
    model = SimpleNamespace(
        hf_text_config=text,
        max_model_len=length,
        original_max_model_len=asked,
        hf_overrides={},
        override_generation_config={},
        try_get_generation_config=dict,
        model="",
        revision=None,
    )
    cache, scheduler = SimpleNamespace(sliding_window=None), SimpleNamespace(max_model_len=length)
    return SimpleNamespace(model_config=model, cache_config=cache, scheduler_config=scheduler)


def _layer(kind: str, length: int) -> Any:
    """vLLM's layer for a kind, corrected as in a loaded model."""
    stated = _vllm_config(kind, length)
    text = stated.model_config.hf_text_config
    _ROPE_DICT.clear()  # vLLM's layers of this process, by their arguments
    current = VllmConfig()
    with set_current_vllm_config(current):
        vars(current)["model_config"] = stated.model_config
        layer = get_rope(SIZE, LONGEST, rope_parameters=dict(text.rope_parameters), dtype=torch.float32)
        vars(current)["model_config"] = None
    rotations.correct(rope_kinds.placed(layer), stated)
    return layer


def _difference(layer: Any, kind: str, length: int) -> float:
    query = rope_kinds.queries(length).flatten(1)
    native = getattr(layer, "forward_native", layer.forward)
    found, _ = native(torch.arange(length), query.clone(), query.clone())
    return float((found.view(length, -1, SIZE) - rope_kinds.turned(kind, length)).abs().max())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LONG])
def test_queries_are_turned_as_in_hugging_face(kind: str) -> None:
    layer = _layer(kind, LONGEST)
    assert max(_difference(layer, kind, length) for length in LENGTHS) < 1e-4


@pytest.mark.parametrize("kind", LONG)
def test_longrope_has_the_table_of_the_longest_text_that_is_served(kind: str) -> None:
    """vLLM takes one of both for all texts, and says so: by default that for short ones."""
    long, short = _layer(kind, LONGEST), _layer(kind, TRAINED)
    assert _difference(long, kind, LONGEST) < 1e-4
    assert _difference(long, kind, TRAINED + 1) < 1e-4
    assert _difference(short, kind, TRAINED) < 1e-4


def test_a_table_that_is_right_stays() -> None:
    layer = _layer("llama3", LONGEST)
    before = layer.cos_sin_cache
    rotations.correct(rope_kinds.placed(layer), _vllm_config("llama3"))
    assert layer.cos_sin_cache is before


@pytest.mark.parametrize("field", ["rope_theta", "factor", "low_freq_factor"])
def test_a_table_of_another_field_is_noticed(field: str) -> None:
    layer, other = _layer("llama3", LONGEST), _vllm_config("llama3")
    other.model_config.hf_text_config.rope_parameters[field] *= 1.5
    before = layer.cos_sin_cache.clone()
    rotations.correct(rope_kinds.placed(layer), other)
    assert float((layer.cos_sin_cache - before).abs().max()) > 1e-2


def test_a_field_that_transformers_does_not_know_is_not_judged() -> None:
    text = rope_kinds.config("dynamic")
    text.rope_parameters["alpha"] = 1000.0
    assert rotary_tables.rotation(text) is None
    assert rotary_tables.limit(text) is None


def test_dynamic_texts_end_at_the_trained_length() -> None:
    config = _vllm_config("dynamic", 2 * LONGEST)
    rotations.settle(config)
    assert config.model_config.max_model_len == config.scheduler_config.max_model_len == LONGEST


def test_a_user_who_asks_for_longer_dynamic_texts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rope_type 'dynamic' .*: --max-model-len 128"):
        rotations.settle(_vllm_config("dynamic", 2 * LONGEST, 2 * LONGEST))


def test_a_window_that_transformers_class_does_not_read_is_none() -> None:
    config = _vllm_config("default")
    config.model_config.hf_text_config.sliding_window = config.cache_config.sliding_window = 8
    rotations.settle(config)
    assert config.model_config.hf_text_config.sliding_window is config.cache_config.sliding_window is None


def test_a_window_that_it_reads_stays() -> None:
    from transformers import MistralConfig

    config = _vllm_config("default")
    config.model_config.hf_text_config, config.cache_config.sliding_window = MistralConfig(sliding_window=8), 8
    rotations.settle(config)
    assert config.cache_config.sliding_window == 8


@pytest.mark.parametrize("stated", [True, False])
def test_llama_4_scales_queries_as_its_configuration_states(stated: bool) -> None:
    from transformers import Llama4TextConfig

    config = _vllm_config("default")
    config.model_config.hf_text_config = Llama4TextConfig(attn_temperature_tuning=stated)
    rotations.settle(config)
    assert config.model_config.override_generation_config == {"attn_temperature_tuning": stated}


def test_a_user_decides_whether_llama_4_scales_queries() -> None:
    from transformers import Llama4TextConfig

    config = _vllm_config("default")
    config.model_config.hf_text_config = Llama4TextConfig(attn_temperature_tuning=True)
    config.model_config.override_generation_config = asked = {"attn_temperature_tuning": False}
    rotations.settle(config)
    assert asked == {"attn_temperature_tuning": False}


NAMES = (
    "dynamic",
    "qwen2_moe, layer_types",  # vLLM's class has no window
    *drawn(
        ("llama, field unread", "yarn, factor below the length", "llama4, attention_chunk_size"),
        1,
        "fields that vLLM misreads",
    ),
)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Engines without a length of the user's, one after the other."""
    root = tmp_path_factory.mktemp("rotations")
    models = {name: positions.build(positions.CASES[name], root / name.replace(" ", "_")) for name in NAMES}
    runs = [
        (path, [positions.vllm_step(positions.prompts(positions.CASES[name]))], {"max_model_len": None})
        for name, path in models.items()
    ]
    result = start_features(*runs).result()
    steps = [run["steps"][0] for run in result["runs"]]
    return {"log": result["log"], **{name: (models[name], step) for name, step in zip(NAMES, steps, strict=True)}}


@pytest.mark.parametrize("name", NAMES)
def test_texts_around_a_limit_score_as_in_hugging_face(name: str, answered: Mapping[str, Any]) -> None:
    path, step = answered[name]
    texts = positions.prompts(positions.CASES[name])
    scores = positions.vllm_scores(texts, step)
    assert max(positions.differences(scores, positions.expected(path, texts))) < 1e-3


def test_the_log_says_where_dynamic_texts_end(answered: Mapping[str, Any]) -> None:
    assert f"--max-model-len is {positions.ORIGINAL} now" in answered["log"]
