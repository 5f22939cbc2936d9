"""Models with state layers on the emulated NPU, with and without quantization.

References compute the state layers, because the chip has no operator for them; the vendor computes the rest if the
host's cache allows. :mod:`half_on_npu` explains the comparison of results in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import quantized_states
import states
from half_on_npu import W8A8, as_near_as_hugging_face, clear_tokens, expert_kernels
from host_engines import Host, Scenario, ran
from quantized_checkpoints import SCHEMES
from quantized_mixture import experts_kernel, operator
from quantized_on_npu import VENDOR, QuantizedOnNPU
from quantized_states import EXPERT_LAYERS, WITH_EXPERTS, architecture
from running import MAX_TOKENS, PROMPTS

DTYPE = "float16"
REFERENCE = "reference.torch"
WAITING = ("causal_conv1d", "gated_delta_rule", "selective_scan")
ATTENTION = {"kv_cache_write", "paged_attention"}
ROUTED = {"topk_softmax", "fused_moe"}
BESIDE: Mapping[str, tuple[set[str], set[str]]] = {
    "qwen3_5": ({"gemma_rms_norm", "silu_and_mul", "rotary_embedding", "linear"}, ATTENTION),
    "mamba2": ({"rms_norm", "linear"}, set()),
    "lfm2": ({"rms_norm", "silu_and_mul", "rotary_embedding", "linear"}, ATTENTION),
    "qwen3_next": ({"gemma_rms_norm", "silu_and_mul", "rotary_embedding", "linear"} | ROUTED, ATTENTION),
    "granitemoehybrid": ({"rms_norm", "silu_and_mul", "linear"} | ROUTED, ATTENTION),
}
"""Model → its operators besides those of states: the others, and those of attention."""
W4A16 = "compressed-tensors W4A16"
FORMATS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("qwen3_5", "mamba2", "lfm2", "granitemoehybrid"), (W8A8, W4A16, "awq")),
    "qwen3_next": (W8A8, W4A16, "gptq"),  # the chip has no zero points for groups of experts
    WITH_EXPERTS: (W8A8,),  # hosts load no other experts that are stored in one tensor
}
PAIRS = [(name, scheme) for name, schemes in FORMATS.items() for scheme in schemes]
"""Pairs of model and scheme that are served quantized."""
GATES: Mapping[str, set[str]] = {"qwen3_5": {"linear"}, "qwen3_next": {"linear"}}
"""Model → operators that checkpoints leave unquantized: the products of gates."""


class StatesOnNPU(Scenario):
    """The drawn models; ``results`` in a host's folder has two passes of each, the second with used slots."""

    DRAWN: ClassVar[Sequence[str]]
    ATTENDS: ClassVar[str]
    """The implementation of attention."""
    OWN: ClassVar[Mapping[str, set[str]]] = {}
    """Model → operators that the host's own code replaces."""
    SIZES: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"name,number": [(name, number) for name in self.DRAWN for number in (0, 1)], "name": self.DRAWN}

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        root = tmp_path_factory.mktemp("states")
        return {name: states.build(name, root / name, **self.SIZES.get(name, {})) for name in self.DRAWN}

    @pytest.fixture(scope="class")
    def decided(self, models: Mapping[str, Path]) -> Mapping[str, list[list[int]]]:
        """Return Hugging Face's tokens as far as half precision decides them."""
        return {name: clear_tokens(model, PROMPTS, MAX_TOKENS, DTYPE) for name, model in models.items()}

    def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
        self, name: str, number: int, results: Mapping[str, Any], models: Mapping[str, Path]
    ) -> None:
        step = results[name]["steps"][number]
        assert as_near_as_hugging_face(name, models[name], PROMPTS, step, DTYPE)

    def test_tokens_equal_hugging_faces_as_far_as_half_precision_decides_them(
        self, name: str, number: int, results: Mapping[str, Any], decided: Mapping[str, list[list[int]]]
    ) -> None:
        assert sum(map(len, decided[name])) >= 24
        assert agree(results[name]["steps"][number]["tokens"], decided[name])

    def test_references_keep_the_states_and_the_vendor_runs_all_else(
        self, name: str, results: Mapping[str, Any]
    ) -> None:
        report, (beside, attention) = results[name]["report"], BESIDE[name]
        by = {
            **dict.fromkeys(beside - self.OWN.get(name, set()), VENDOR),
            **dict.fromkeys(attention, self.ATTENDS),
            **dict.fromkeys(states.OPERATORS[name], REFERENCE),
        }
        assert {operator: impls & {VENDOR, REFERENCE} for operator, impls in ran(report).items()} == {
            operator: {impl} for operator, impl in by.items()
        }
        assert (report["native_layers"], report["failed"]) == ({}, {})


def agree(tokens: Sequence[Sequence[int]], decided: Sequence[Sequence[int]]) -> bool:
    """Whether texts begin with these tokens."""
    return all(list(found[: len(clear)]) == clear for found, clear in zip(tokens, decided, strict=True))


class QuantizedStatesOnNPU(QuantizedOnNPU):
    """A model in the schemes drawn for it."""

    MODEL: ClassVar[str]
    ATTENDS: ClassVar[str]
    OWN: ClassVar[Mapping[str, set[str]]] = {}
    SIZES: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    COUNTS: ClassVar[Mapping[str, int]] = quantized_states.PRODUCTS
    LEFT: ClassVar[Mapping[str, set[str]]] = GATES
    CHOSEN: ClassVar[Sequence[tuple[str, str]]]
    """Pairs of model and scheme."""

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "MODEL"):
            return
        made = architecture(cls.MODEL)
        beside, attention = BESIDE[made]
        cls.DRAWN = [scheme for name, scheme in cls.CHOSEN if name == cls.MODEL]
        vendors = attention if cls.ATTENDS == VENDOR else set()
        routed = {"fused_moe"} if cls.MODEL in EXPERT_LAYERS else ROUTED
        quantized = {"linear"} - cls.LEFT.get(cls.MODEL, set()) | routed
        cls.OTHERS = beside - quantized - cls.OWN.get(cls.MODEL, set()) | vendors
        cls.REFERENCES = attention - vendors | {*states.OPERATORS[made]}
        cls.PRODUCTS = cls.COUNTS[cls.MODEL]

    def kernels(self, name: str) -> Sequence[str]:
        experts = expert_kernels(name) if self.MODEL in EXPERT_LAYERS else ()
        return (*super().kernels(name), *experts)

    def operators(self, name: str) -> set[str]:
        experts = {operator(SCHEMES[name])} if self.MODEL in EXPERT_LAYERS else set()
        return super().operators(name) | experts

    def counted(self, name: str, host: Host) -> Mapping[str, int]:
        layers = EXPERT_LAYERS.get(self.MODEL)
        return {**super().counted(name, host), **({experts_kernel(name): layers} if layers else {})}

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        sizes = self.SIZES.get(self.MODEL, {})
        return quantized_states.build(self.MODEL, tmp_path_factory.mktemp("states") / "whole", **sizes)
