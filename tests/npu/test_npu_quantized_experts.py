"""Quantized experts in vLLM on ``npu:0``: no documented rule of the chip is waived.

The commit draws one of the checkpoints whose experts are served, and one of those that are refused.
"""

from __future__ import annotations

from collections.abc import Callable

from half_on_npu import EXPERTS, REFUSED_EXPERTS, expert_kernels
from host_engines import Served
from quantized_on_npu import QuantizedExpertsOnNPU
from sampling import drawn


class TestExperts(QuantizedExpertsOnNPU):
    DRAWN = drawn(EXPERTS, 1, "quantized experts on the NPU")
    REFUSED = drawn(list(REFUSED_EXPERTS), 1, "quantized experts that the NPU refuses")

    def test_each_layer_makes_the_calls_that_the_backend_documents(
        self, name: str, served: Callable[[str], Served]
    ) -> None:
        answer = served(name).answers[0]
        assert answer.kernels is not None
        layers = answer.kernels["npu_fused_infer_attention_score"]
        for kernel in expert_kernels(name):
            assert answer.kernels[kernel] == layers * (2 if kernel == "npu_grouped_matmul" else 1)
        assert answer.waits == {}
