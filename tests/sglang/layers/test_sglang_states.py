"""Layers with a state under SGLang on a CPU: delta nets, state spaces and short convolutions.

Slots hold NaN where SGLang would clear them. Wrong implementations run, and forgetful ones that leave a state as it is.
"""

from __future__ import annotations

from host_engines import WRONG
from sampling import drawn
from states import OPERATORS, States

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
    }
