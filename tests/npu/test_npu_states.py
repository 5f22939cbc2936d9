"""Models whose layers keep a state in vLLM on ``npu:0``, not quantized and quantized.

References attend beside the states: one lies in each block of the cache, and the chip's attention wants all keys before
all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chip_engines import STEP, start

import states
from processes import Runs
from quantized_states import WITH_EXPERTS
from running import PROMPTS
from sampling import drawn
from states_on_npu import BESIDE, DTYPE, PAIRS, REFERENCE, WAITING, QuantizedStatesOnNPU, StatesOnNPU


class TestStates(StatesOnNPU):
    DRAWN = drawn(tuple(BESIDE), 2, "models with states on the NPU")
    ATTENDS = REFERENCE

    @pytest.fixture(scope="class")
    def results(self, models: Mapping[str, Path], npu_environment: Callable[..., dict[str, str]]) -> Mapping[str, Any]:
        return Runs({name: start(model, DTYPE, [STEP, STEP], npu_environment()) for name, model in models.items()})

    def test_the_log_says_what_waits_and_that_no_prefix_is_remembered(
        self, name: str, results: Mapping[str, Any]
    ) -> None:
        log = results[name]["log"]
        assert f"{', '.join(op for op in states.OPERATORS[name] if op in WAITING)}: only references, which wait" in log
        assert [step["cached"] for step in results[name]["steps"]] == 2 * [[0] * len(PROMPTS)]
        said = "CacheConfig.enable_prefix_caching: False instead of True, because vLLM's kernels that move states"
        assert (said in log) == bool(BESIDE[name][1])  # vLLM remembers none of a model without attention


class Quantized(QuantizedStatesOnNPU):
    ATTENDS = REFERENCE
    CHOSEN = drawn(PAIRS, 1, "quantized states on the NPU")


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
