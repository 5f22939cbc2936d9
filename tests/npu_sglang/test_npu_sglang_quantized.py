"""Quantized checkpoints in SGLang on ``npu:0``; the commit draws one."""

from __future__ import annotations

from half_on_npu import INTEGER_SCHEMES, W8A8
from quantized_on_npu import QuantizedOnNPU
from sampling import drawn


class TestQuantized(QuantizedOnNPU):
    DRAWN = drawn([W8A8, *INTEGER_SCHEMES], 1, "quantized checkpoints of SGLang on the NPU")
