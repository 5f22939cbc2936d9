"""Quantized models in SGLang on a GPU: a scheme for each layer, and one that SGLang has kernels of its own for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from quantized_graphs import QuantizedGraphs

import quantized_checkpoints as checkpoints
from host_engines import Host
from quantized_checkpoints import Scheme
from quantized_engines import QuantizedModels, Run

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
