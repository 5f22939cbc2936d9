"""Quantized experts in SGLang on a GPU; the products of attention are quantized too."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from quantized_graphs import QuantizedGraphs

from host_engines import Host
from quantized_engines import Run
from quantized_mixture import LAYERS, QuantizedMixtures


@pytest.mark.gpu
class TestExperts(QuantizedGraphs, QuantizedMixtures):
    RUNS = (Run("fp8, blocks of 128"), Run("awq"))

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        return {**super().counted(run, host), host.layers.get(run.scheme, run.made.layer): 2 * LAYERS}
