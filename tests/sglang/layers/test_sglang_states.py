"""Layers with a state under SGLang on a CPU: delta nets, state spaces and short convolutions.

Slots hold NaN where SGLang would clear them. Wrong implementations run, and forgetful ones that leave a state as it is.
"""

from __future__ import annotations

from pathlib import Path

from serving import start

from host_engines import WRONG
from running import expected_tokens
from sampling import drawn
from states import OPERATORS, States, build

FORGETFUL = "vendor.forgetful"


class TestStates(States):
    MODELS = drawn(tuple(OPERATORS), 3, "models with states of SGLang")
    MISTAKES = {
        name: (
            *({operator: WRONG} for operator in operators),
            *({operator: FORGETFUL} for operator in operators if operator != "rms_norm_gated"),
        )
        for name, operators in OPERATORS.items()
    }
    OPTIONS = {"max_mamba_cache_size": 32}  # so few that they are used again
    PLACE = {
        "plugins": ("wrong_plugin", "forgetful_plugin", "used_slots"),
        "deny": "wrong,forgetful",
        "SGLANG_FL_PREFER": "reference",
        "SGLANG_FL_DAMAGED_REQUESTS": "ignore",  # a mistake may answer with NaN
    }


class TestRanks(TestStates):
    """Two of them, which divide the layers; the norm of Mamba 2 is SGLang's own where they share its mean."""

    MODELS = drawn(
        [name for name, operators in OPERATORS.items() if "rms_norm_gated" not in operators],
        1,
        "models with states on two ranks of SGLang",
    )
    MISTAKES = {}
    OPTIONS = {**TestStates.OPTIONS, "tp_size": 2}


def test_with_our_order_of_implementations_the_tokens_are_right_too(tmp_path: Path) -> None:
    """A library's products run then, and a linear layer that only holds a convolution's weight has none."""
    model = build("qwen3_5", tmp_path / "model")
    result = start(model, engine=TestStates.OPTIONS).result()
    assert result["steps"][0]["tokens"] == expected_tokens(model)
    assert result["report"]["counts"]["linear vendor.cpu.onednn"] > 0
    assert result["report"]["native_layers"] == {}
