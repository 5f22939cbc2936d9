"""A model with an encoder and a decoder writes Hugging Face's tokens for a sound, by our attention over both caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, start_features

import speech

LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speech.build(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="module")
def run(model: Path) -> dict[str, Any]:
    steps = [
        {"do": "transcribe", "sounds": sounds, "rate": speech.RATE, "max_tokens": MAX_TOKENS}
        for sounds in (speech.sounds(), speech.sounds()[1:])
    ]
    (found,) = start_features((model, steps, {"max_model_len": 128, "max_num_batched_tokens": 256})).result()["runs"]
    return dict(found)


def test_tokens_equal_hugging_face_together_and_alone(run: dict[str, Any], model: Path) -> None:
    expected = [speech.expected(model, sound, MAX_TOKENS) for sound in speech.sounds()]
    together, alone = run["steps"]
    assert together == expected
    assert alone == expected[1:]
    assert expected[0] != expected[1]


def test_the_decoder_attends_to_itself_and_to_the_encoder_through_our_operators(run: dict[str, Any]) -> None:
    assert sum(run["report"]["attention"].values()) == 2 * LAYERS
    assert run["report"]["layers"]["WhisperEncoderAttention"] == LAYERS
    assert run["report"]["native_layers"] == {}
    operators = {key.split(" ")[0] for key in run["report"]["counts"]}
    assert {"kv_cache_write", "paged_attention"} <= operators
