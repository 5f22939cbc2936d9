"""A package that ``fl new-backend NAME --device npu`` wrote serves under vLLM."""

from __future__ import annotations

from own_chip import OwnChip


class TestChip(OwnChip):
    UNSET = ("VLLM_FL_PREFER",)
    WARNING = "device 'nimbus' was never verified under vLLM"
