"""Models whose layers keep a state in vLLM on ``npu:0``, not quantized and quantized.

The references compute those layers and attention beside them, because no operator of the chip does: a state lies in
each block of the cache, and the chip's attention wants all keys before all values. All else is the vendor's. How
results are compared in half precision says :mod:`half_on_npu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from chip_engines import STEP, counts, start

import quantized_states
import states
from half_on_npu import W8A8, as_near_as_hugging_face, clear_tokens
from processes import Runs
from quantized_on_npu import VENDOR, QuantizedOnNPU
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

DTYPE = "float16"
REFERENCE = "reference.torch"
WAITING = ("causal_conv1d", "gated_delta_rule", "selective_scan")
MODELS: Mapping[str, tuple[set[str], set[str]]] = {
    "qwen3_5": (
        {"gemma_rms_norm", "silu_and_mul", "rotary_embedding", "linear"},
        {"kv_cache_write", "paged_attention"},
    ),
    "mamba2": ({"rms_norm", "linear"}, set()),
    "lfm2": ({"rms_norm", "silu_and_mul", "rotary_embedding", "linear"}, {"kv_cache_write", "paged_attention"}),
}
"""Model → what the vendor runs beside its states, and what the references do."""
LEFT = {"qwen3_5": {"linear"}}
"""Model → what checkpoints leave as it is, the products of gates."""
DRAWN = drawn(tuple(MODELS), 2, "models with states on the NPU")
PAIRS = drawn(
    [(name, scheme) for name in MODELS for scheme in (W8A8, "compressed-tensors W4A16", "awq")],
    1,
    "quantized states on the NPU",
)
each_model = pytest.mark.parametrize("name", DRAWN)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("states")
    return {name: states.build(name, root / name) for name in DRAWN}


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path], npu_environment: Callable[..., dict[str, str]]) -> Mapping[str, Any]:
    """Two passes, of which the second has slots that others left their states in."""
    return Runs({name: start(model, DTYPE, [STEP, STEP], npu_environment()) for name, model in models.items()})


@each_model
@pytest.mark.parametrize("number", [0, 1], ids=["first", "again"])
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    name: str, number: int, results: Mapping[str, Any], models: Mapping[str, Path]
) -> None:
    step = results[name]["steps"][number]
    assert as_near_as_hugging_face(name, models[name], PROMPTS, step, DTYPE)


@each_model
def test_tokens_equal_hugging_faces_as_far_as_half_precision_decides_them(
    name: str, results: Mapping[str, Any], models: Mapping[str, Path]
) -> None:
    expected = clear_tokens(models[name], PROMPTS, MAX_TOKENS, DTYPE)
    assert sum(map(len, expected)) >= 24
    for step in results[name]["steps"]:
        assert [tokens[: len(clear)] for tokens, clear in zip(step["tokens"], expected, strict=True)] == expected


@each_model
def test_references_keep_the_states_and_the_vendor_runs_all_else(name: str, results: Mapping[str, Any]) -> None:
    report, (vendors, references) = results[name]["report"], MODELS[name]
    by = {VENDOR: vendors, REFERENCE: references | {*states.OPERATORS[name]}}
    assert counts(report) == {operator: {impl} for impl, operators in by.items() for operator in operators}
    assert (report["native_layers"], report["failed"]) == ({}, {})


@each_model
def test_the_log_says_what_waits_and_that_no_prefix_is_remembered(name: str, results: Mapping[str, Any]) -> None:
    log = results[name]["log"]
    assert f"{', '.join(op for op in states.OPERATORS[name] if op in WAITING)}: only references, which wait" in log
    assert [step["cached"] for step in results[name]["steps"]] == 2 * [[0] * len(PROMPTS)]
    said = "CacheConfig.enable_prefix_caching: False instead of True, because vLLM's kernels that move states"
    assert (said in log) == bool(MODELS[name][1])  # vLLM remembers none of a model without attention


class QuantizedStates(QuantizedOnNPU):
    """A model in the schemes that are drawn for it."""

    MODEL: ClassVar[str]

    def __init_subclass__(cls) -> None:
        vendors, references = MODELS[cls.MODEL]
        cls.DRAWN = [scheme for name, scheme in PAIRS if name == cls.MODEL]
        cls.OTHERS = vendors - ({"linear"} - LEFT.get(cls.MODEL, set()))
        cls.REFERENCES = references | {*states.OPERATORS[cls.MODEL]}
        cls.PRODUCTS = quantized_states.PRODUCTS[cls.MODEL]

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return quantized_states.build(self.MODEL, tmp_path_factory.mktemp("states") / "whole")


class TestDeltaNets(QuantizedStates):
    MODEL = "qwen3_5"


class TestStateSpaces(QuantizedStates):
    MODEL = "mamba2"


class TestShortConvolutions(QuantizedStates):
    MODEL = "lfm2"
