"""Quantized models with latent attention in vLLM's engines: what the dequantized network computes.

vLLM reads prompts in the form that is not absorbed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import quantized_checkpoints as checkpoints
from host_engines import Engine, Host, Pass, Served
from quantized_checkpoints import SCHEMES
from quantized_engines import Run
from quantized_mixture import EXPERTS, GIVEN, LATENT_LAYERS, KimiK2, QuantizedLatent, latent
from sampling import drawn

pytestmark = pytest.mark.engine
BLOCKS = "fp8, blocks of 128"
FINE = [name for name in EXPERTS if SCHEMES[name].rows is None]
"""Schemes that leave inputs as they are, so that engine and network are so near that a small mistake shows."""
OTHERS = [name for name in EXPERTS if name not in (*FINE, *GIVEN, BLOCKS)]
COMPILED = Run(BLOCKS, {"enforce_eager": False}, "compiled")
RANKS = Run(BLOCKS, {"tensor_parallel_size": 2}, "two ranks")
NAMES = (BLOCKS, *drawn(FINE, 1, "latent, fine"), *drawn(OTHERS, 0, "latent, others"))


class TestLatent(QuantizedLatent):
    ATTENTION = ("kv_cache_write", "mla_decode", "mla_prefill")
    ALONE = [Run(name, kind="eager") for name in NAMES]
    RUNS = [*ALONE, *drawn([COMPILED, RANKS], 1, "latent, compiled and ranks")]

    def test_its_attention_is_ours(self, run: Run, served: Callable[[Run], Served]) -> None:
        assert all(report["attention"] == {"MLAFLImpl": LATENT_LAYERS} for report in served(run).reports)


class TestKimiK2(KimiK2):
    ATTENTION = TestLatent.ATTENTION


def test_scales_for_inputs_are_refused(host: Host, tmp_path: Path) -> None:
    """vLLM finds the weight of ``kv_b_proj`` by a product, whose input such a scale would round."""
    written = checkpoints.write_checkpoint(
        tmp_path / "quantized", SCHEMES["fp8, static"], model=latent(tmp_path / "whole")
    )
    (started,) = host.serve(Engine(written, [Pass()]))
    with pytest.raises(AssertionError, match="latent attention with scales for inputs in the checkpoint yet"):
        started.result()
