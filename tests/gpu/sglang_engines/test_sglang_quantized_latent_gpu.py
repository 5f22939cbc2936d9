"""Quantized models with latent attention in SGLang on a GPU: what the dequantized network computes, from graphs."""

from __future__ import annotations

import pytest
from quantized_graphs import QuantizedGraphs

from quantized_engines import Run
from quantized_mixture import QuantizedLatent, QuantizedSparse

BLOCKS = "fp8, blocks of 128"


class LatentGraphs(QuantizedGraphs):
    """SGLang takes the absorbed form for prompts too."""

    ABSORBED = True
    UNIT = 2.0**-22
    """Matrix units cut off what they add."""


@pytest.mark.gpu
class TestLatent(LatentGraphs, QuantizedLatent):
    ATTENTION = ("mla_decode",)
    PLAIN = ("gptq",)
    RUNS = (Run(BLOCKS), Run("gptq"), Run("awq"))


@pytest.mark.gpu
class TestSparse(LatentGraphs, QuantizedSparse):
    OPTIONS = {}
    ATTENTION = ("index_key_write", "index_topk", "mla_sparse")
    OF_INDEXER = 2
    RUNS = (Run(BLOCKS), Run("awq"))
