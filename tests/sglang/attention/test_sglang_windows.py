"""Layers have the window that the configuration states, as in Hugging Face, also where SGLang's class has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import transformers
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import nn

from fl_dispatch.hosting.positions import windows
from positions import WINDOW, TextsAroundLimits
from sampling import drawn
from sglang_fl.attention import attention_layers

MIXED = ["sliding_attention", "full_attention"]
STATED = {
    "Mistral": ("MistralConfig", {"sliding_window": WINDOW}, [WINDOW, WINDOW]),
    "Mistral without one": ("MistralConfig", {"sliding_window": None}, [None, None]),
    "Qwen 2 from a layer on": (
        "Qwen2Config",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        [None, WINDOW],
    ),
    "Qwen 2, switched off": ("Qwen2Config", {"sliding_window": WINDOW, "use_sliding_window": False}, [None, None]),
    "Qwen 3, by layers": (
        "Qwen3Config",
        {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED},
        [WINDOW, None],
    ),
    "Cohere 2, the token itself beside it": (
        "Cohere2Config",
        {"sliding_window": WINDOW, "layer_types": MIXED},
        [WINDOW + 1, None],
    ),
    "Llama, which has no such field": ("LlamaConfig", {"sliding_window": WINDOW}, None),
    "Mistral, which does not read kinds of layers": (
        "MistralConfig",
        {"sliding_window": WINDOW, "layer_types": MIXED},
        [WINDOW, WINDOW],
    ),
    "layers of an unknown kind": (
        "Qwen2Config",
        {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
        None,
    ),
}


def _config(kind: str, fields: Mapping[str, Any]) -> Any:
    return getattr(transformers, kind)(num_hidden_layers=2, **fields)


def _model(*sizes: int, kind: AttentionType = AttentionType.DECODER) -> nn.Module:
    """A model with an attention layer for each size: tokens before a token's own, -1 for all."""
    return nn.ModuleList(
        RadixAttention(2, 16, 1.0, 2, layer_id=number, sliding_window_size=size, attn_type=kind)
        for number, size in enumerate(sizes)
    )


def _sizes(model: nn.Module) -> list[int | None]:
    return [attention_layers.window(layer) for _, layer in attention_layers.layers(model)]


@pytest.mark.parametrize(("kind", "fields", "stated"), STATED.values(), ids=STATED)
def test_windows_are_read_as_transformers_reads_them(
    kind: str, fields: Mapping[str, Any], stated: list[int | None] | None
) -> None:
    assert windows.windows(_config(kind, fields)) == stated


def test_a_layer_without_the_stated_window_gets_it(caplog: pytest.LogCaptureFixture) -> None:
    model = _model(-1, -1)
    with caplog.at_level("INFO"):
        attention_layers.give_windows(model, _config("Qwen2Config", STATED["Qwen 2 from a layer on"][1]), [])
    assert _sizes(model) == [None, WINDOW]
    assert "gives 1 layers a window of 8 tokens" in caplog.text


def test_a_window_of_another_size_stays_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = _model(WINDOW - 1, WINDOW)
    attention_layers.give_windows(model, _config("MistralConfig", {"sliding_window": WINDOW}), [])
    assert _sizes(model) == [WINDOW, WINDOW + 1]
    assert "gives them a window of 9 tokens, which holds" in caplog.text


def test_attention_to_both_sides_keeps_its_own() -> None:
    model = _model(-1, kind=AttentionType.ENCODER_ONLY)
    attention_layers.give_windows(model, _config("MistralConfig", {"sliding_window": WINDOW}), [])
    assert _sizes(model) == [None]


def test_a_missing_window_is_refused_where_the_hosts_own_attention_runs() -> None:
    with pytest.raises(ValueError, match=r"'triton' have none for them: leave --attention-backend unset"):
        attention_layers.give_windows(_model(-1, -1), _config("MistralConfig", {"sliding_window": WINDOW}), ["triton"])


MISSING = drawn(
    ("mistral", "mixtral", "phi3", "starcoder2", "qwen2, layer_types", "qwen3, use_sliding_window"),
    1,
    "windows that SGLang leaves out",
)


@pytest.mark.engine
class TestTexts(TextsAroundLimits):
    NAMES = MISSING
