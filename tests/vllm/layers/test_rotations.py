"""Every kind of rotation turns queries as Hugging Face does around each limit, or is limited in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

import rope_kinds
from fl_dispatch.hosting.positions import rotary_tables
from host_engines import Served
from positions import ORIGINAL, Case, TextsAroundLimits
from rope_kinds import LONG, LONGEST, SIZE, TRAINED, Rotations, difference
from sampling import drawn
from vllm_fl.layers import rotations


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


def _turns(layer: Any) -> Any:
    return getattr(layer, "forward_native", layer.forward)


class TestRotations(Rotations):
    def rotary(self, kind: str) -> Any:
        return _turns(_layer(kind, LONGEST))


@pytest.mark.parametrize("kind", LONG)
def test_longrope_has_the_table_of_the_longest_text_that_is_served(kind: str) -> None:
    """vLLM takes one of both for all texts, and says so: by default that for short ones."""
    long, short = _turns(_layer(kind, LONGEST)), _turns(_layer(kind, TRAINED))
    assert difference(long, kind, LONGEST) < 1e-4
    assert difference(long, kind, TRAINED + 1) < 1e-4
    assert difference(short, kind, TRAINED) < 1e-4


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
    *drawn(
        (
            "qwen2_moe, layer_types",  # vLLM's class has no window
            "llama, field unread",
            "yarn, factor below the length",
            "llama4, attention_chunk_size",
        ),
        1,
        "fields that vLLM misreads",
    ),
)


@pytest.mark.engine
class TestTexts(TextsAroundLimits):
    NAMES = NAMES

    def options(self, case: Case) -> Mapping[str, Any]:
        return {"max_model_len": None}  # no length of the user's

    def test_the_log_says_where_dynamic_texts_end(self, served: Mapping[str, Future[Served]]) -> None:
        assert f"--max-model-len is {ORIGINAL} now" in served["dynamic"].result().log
