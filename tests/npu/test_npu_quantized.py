"""Quantized checkpoints in vLLM on ``npu:0``: no documented rule of the chip is waived.

W8A8 runs at every commit, with one of the others, which the commit draws.
"""

from __future__ import annotations

from collections.abc import Callable

from half_on_npu import INTEGER_SCHEMES, W8A8, quantized_kernels
from host_engines import Served
from quantized_on_npu import QuantizedOnNPU
from sampling import drawn


class TestQuantized(QuantizedOnNPU):
    DRAWN = [W8A8, *drawn(INTEGER_SCHEMES, 1, "quantized checkpoints on the NPU")]

    def test_each_product_makes_the_calls_that_the_backend_documents(
        self, name: str, served: Callable[[str], Served]
    ) -> None:
        answer = served(name).answers[0]
        assert answer.kernels is not None
        products = 4 * answer.kernels["npu_fused_infer_attention_score"]
        assert {answer.kernels[kernel] for kernel in quantized_kernels(name)} == {products}
        assert "npu_linear" not in answer.kernels
        assert answer.waits == {}
