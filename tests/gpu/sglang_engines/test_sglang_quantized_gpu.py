"""Quantized models in SGLang on a GPU, from graphs: dense ones, and those with layers that keep a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from quantized_graphs import QuantizedGraphs

import quantized_checkpoints as checkpoints
from host_engines import Host
from quantized_checkpoints import Scheme
from quantized_engines import QuantizedModels, Run
from quantized_states import OF_SGLANG, QuantizedStates
from quantized_states import Run as StatesRun

MIXED = ("compressed-tensors W8A8 int8", "compressed-tensors W8A8 fp8", "compressed-tensors W4A16, zero points")
LAYERED = checkpoints.layered(*MIXED, "compressed-tensors W8A16 fp8")


class Layered(Run):
    """A scheme of ``compressed-tensors`` for each layer."""

    @property
    def made(self) -> Scheme:
        return LAYERED


@pytest.mark.gpu
class TestQuantized(QuantizedGraphs, QuantizedModels):
    RUNS = (
        Layered("a scheme a layer"),
        Run("gptq"),
        Run("compressed-tensors W4A8 int8"),
        Run("compressed-tensors MXFP8"),
    )

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        if isinstance(run, Layered):
            layers = ("Int8Layer", "Fp8Layer", "PackedLayer", "Fp8WeightLayer")
            return dict.fromkeys(layers, self.PRODUCTS // len(layers))
        return super().counted(run, host)


@pytest.mark.gpu
class TestStates(QuantizedGraphs, QuantizedStates):
    OPTIONS = {"max_mamba_cache_size": 32}  # else states have most of the memory
    PRODUCTS = {**OF_SGLANG, "qwen3_next": 8}  # fp8 in blocks: shared experts are a further expert of each layer
    UNIT = 2.0**-22
    """Matrix units cut off what they add."""
    RUNS = (
        StatesRun("fp8", model="qwen3_5"),
        StatesRun("fp8, blocks of 128", model="qwen3_next"),
        StatesRun("awq", model="qwen3_5_moe"),
        StatesRun("compressed-tensors W8A8 int8", model="mamba2"),
        StatesRun("compressed-tensors W4A16", model="granitemoehybrid"),
        StatesRun("gptq", model="lfm2"),
    )

    def attention(self, run: StatesRun) -> Sequence[str]:
        return () if run.model == "mamba2" else ("paged_attention",)

    def operators(self, run: StatesRun) -> Sequence[str]:  # type: ignore[override]
        """Return a run's operators, without those of decoding's states: a replay calls none."""
        return [operator for operator in super().operators(run) if not operator.endswith("_update")]
