"""A latent cache in fp8 under vLLM."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from host_engines import Served
from latent_cache import ENGINE, SCALES, LatentCachesOfVLLM, Run
from quantized_mixture import LATENT_LAYERS

EXTENDED = {**ENGINE, "worker_extension_cls": "worker_extension.TrainerExtension"}
ONES = Run("scales of 1", ENGINE)


@pytest.mark.engine
class TestCaches(LatentCachesOfVLLM):
    WRONG = ONES
    RUNS = (
        ONES,
        Run("a scale for each layer", EXTENDED, SCALES),
        Run("compiled", {**EXTENDED, "enforce_eager": False}, SCALES),
        Run("bfloat16", {**ENGINE, "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}, half=True),
    )

    def test_its_attention_is_ours(self, run: Run, served: Callable[[Run], Served]) -> None:
        assert served(run).reports[0]["attention"] == {"MLAFLImpl": LATENT_LAYERS}
