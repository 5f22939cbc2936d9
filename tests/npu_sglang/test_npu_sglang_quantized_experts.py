"""Quantized experts in SGLang on ``npu:0``.

The commit draws one of the checkpoints whose experts are served, and one of those that are refused.
"""

from __future__ import annotations

from half_on_npu import EXPERTS, REFUSED_EXPERTS
from quantized_on_npu import QuantizedExpertsOnNPU
from sampling import drawn


class TestExperts(QuantizedExpertsOnNPU):
    DRAWN = drawn(EXPERTS, 1, "quantized experts of SGLang on the NPU")
    REFUSED = drawn(list(REFUSED_EXPERTS), 1, "quantized experts that SGLang refuses on the NPU")
    OTHERS = {*QuantizedExpertsOnNPU.OTHERS, "linear"}
    """With the router's product."""
