"""Models whose layers keep a state in SGLang on ``npu:0``, not quantized and quantized.

States have a pool of their own, so the chip attends beside them. Its pages have 128 tokens, and SGLang remembers states
in pages of one, so no prefix is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import run

import states
from half_on_npu import FEW, HEADS
from host_engines import WRONG
from processes import Runs, pool
from quantized_on_npu import VENDOR
from quantized_states import OF_SGLANG, WITH_EXPERTS
from running import MAX_TOKENS, PROMPTS
from sampling import drawn
from states_on_npu import BESIDE, DTYPE, GATES, PAIRS, WAITING, QuantizedStatesOnNPU, StatesOnNPU, agree

STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}
FORGETFUL = "vendor.forgetful"
PLUGINS = "wrong_kernels,policy_method,wrong_plugin,forgetful_plugin"
HERE = Path(__file__).parent
PATH = (HERE.parent / "plugins", HERE.parent / "sglang/plugins")
ONE_HEAD: Mapping[str, Any] = {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
OF_GRANITE = {**ONE_HEAD, "mamba_n_heads": 16}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": HEADS,
    "qwen3_next": HEADS,
    "granitemoehybrid": OF_GRANITE,
    WITH_EXPERTS: OF_GRANITE,
    "lfm2": {
        **ONE_HEAD,
        "conv_dim": 128,
        "block_dim": 128,
    },
}
"""Heads of 128 elements, which the chip's attention takes."""
OWN = {"lfm2": {"silu_and_mul"}}
"""SGLang's LFM2 multiplies by gate and up apart."""
DRAWN = drawn(tuple(BESIDE), 1, "models with states of SGLang on the NPU")
MISTAKES = {
    name: [
        *((operator, WRONG) for operator in states.OPERATORS[name]),
        *((operator, FORGETFUL) for operator in states.OPERATORS[name] if operator != "rms_norm_gated"),
    ]
    for name in DRAWN
}


class TestStates(StatesOnNPU):
    DRAWN = DRAWN
    ATTENDS = VENDOR
    OWN = OWN
    SIZES = SIZES

    def cases(self) -> Mapping[str, Any]:
        mistakes = [(name, index) for name in self.DRAWN for index in range(len(MISTAKES[name]))]
        return {"name,mistake": mistakes, **super().cases()}

    @pytest.fixture(scope="class")
    def results(self, models: Mapping[str, Path]) -> Mapping[str, Any]:
        variables = {
            "SGLANG_FL_PLUGIN_MODULES": PLUGINS,
            "SGLANG_FL_PREFER": "vendor",
            "SGLANG_FL_DENY_VENDORS": "wrong,forgetful",
            "SGLANG_FL_DAMAGED_REQUESTS": "ignore",  # a mistake may answer with NaN
        }

        def mistaken(name: str, operator: str, impl: str) -> Any:
            vendors = {beside: ["vendor:ascend"] for part in BESIDE[name] for beside in part}
            policy = {"prefer": "reference", "per_op_order": {**vendors, operator: [f"impl:{impl}"]}}
            return {**STEP, "max_tokens": FEW, "policy": policy}

        def start(name: str, model: Path) -> Any:
            steps = [STEP, STEP, *(mistaken(name, *one) for one in MISTAKES[name])]
            return pool.submit(run, model, steps, {"dtype": DTYPE}, PATH, **variables)

        return Runs({name: start(name, model) for name, model in models.items()})

    def test_the_log_says_what_waits_and_that_no_prefix_is_remembered(
        self, name: str, results: Mapping[str, Any]
    ) -> None:
        log = results[name]["log"]
        assert f"{', '.join(op for op in states.OPERATORS[name] if op in WAITING)}: only references, which wait" in log
        assert [step["cached"] for step in results[name]["steps"][:2]] == 2 * [[0] * len(PROMPTS)]
        assert "no prefix is remembered: SGLang remembers states in pages of one token, not 128" in log

    def test_a_mistake_changes_the_tokens(
        self, name: str, mistake: int, results: Mapping[str, Any], decided: Mapping[str, list[list[int]]]
    ) -> None:
        report, (operator, impl) = results[name]["report"], MISTAKES[name][mistake]
        assert not agree(results[name]["steps"][2 + mistake]["tokens"], [clear[:FEW] for clear in decided[name]])
        assert report["counts"][f"{operator} {impl}"] > 0


class Quantized(QuantizedStatesOnNPU):
    ATTENDS = VENDOR
    OWN = OWN
    SIZES = SIZES
    COUNTS = OF_SGLANG
    LEFT = {**GATES, WITH_EXPERTS: {"linear"}}
    """With the router's product."""
    CHOSEN = drawn(PAIRS, 1, "quantized states of SGLang on the NPU")


class TestDeltaNets(Quantized):
    MODEL = "qwen3_5"


class TestDeltaNetsAndExperts(Quantized):
    MODEL = "qwen3_next"


class TestStateSpaces(Quantized):
    MODEL = "mamba2"


class TestStateSpacesAndAttention(Quantized):
    MODEL = "granitemoehybrid"


class TestStateSpacesAndExperts(Quantized):
    MODEL = WITH_EXPERTS


class TestShortConvolutions(Quantized):
    MODEL = "lfm2"
