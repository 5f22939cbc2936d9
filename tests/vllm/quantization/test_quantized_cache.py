"""A quantized KV cache in vLLM's engines: what Hugging Face's network computes whose keys and values are rounded so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from host_engines import Call, Engine, Host, Served
from quantized_cache import COMPRESSED, FP8, INT8, PLAIN, QuantizedCaches, Run
from sampling import drawn

HEAD, SCALE = 128, 4
"""Elements of a head of the small model, and bytes of a scale in int8."""
IN_FP8, IN_INT8 = {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8_per_token_head"}
EAGER = Run("eager", PLAIN, IN_FP8)
HALF = Run("bfloat16", PLAIN, {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"})
SCALED = Run("scales of a compressed-tensors checkpoint, compiled", COMPRESSED, {"enforce_eager": False})
OWN_SCALES = Run("scales of an fp8 checkpoint", FP8, IN_FP8)
TOKENS = Run("int8, a scale for each token and head", INT8, IN_INT8)
TOKENS_HALF = Run("int8, bfloat16", INT8, {**IN_INT8, "dtype": "bfloat16"})


@pytest.mark.engine
class TestCaches(QuantizedCaches):
    ALONE = [EAGER, TOKENS]
    SINGLE = [*ALONE, *drawn((SCALED, OWN_SCALES), 1, "scales of a cache")]
    HALVES = [HALF, TOKENS_HALF]

    def calls(self) -> Sequence[Call]:
        return [Call("blocks")]

    @pytest.fixture(scope="class")
    def blocks(self, host: Host) -> int:
        """Those of a cache that is not quantized."""
        (started,) = host.serve(Engine(PLAIN.checkpoint(), [Call("blocks")], {"kv_cache_dtype": "auto"}))
        return int(started.result().answers[0].returned)

    @pytest.mark.parametrize(("quantized", "of_an_element"), [(EAGER, 1), (TOKENS, 1 + SCALE / HEAD)], ids=str)
    def test_more_blocks_fit_into_its_memory(
        self, quantized: Run, of_an_element: float, served: Callable[[Run], Served], blocks: int
    ) -> None:
        """As many more as a number in float32 takes more bytes than one in the cache with its part of the scale."""
        assert served(quantized).answers[2].returned == pytest.approx(blocks * 4 / of_an_element, rel=0.01)
