"""A package that ``fl new-backend NAME --device npu`` wrote serves under SGLang."""

from __future__ import annotations

from own_chip import OwnChip


class TestChip(OwnChip):
    UNSET = ("SGLANG_FL_PREFER", "SGLANG_FL_PLUGIN_MODULES")
    WARNING = "device 'nimbus' was never verified under SGLang"
