"""Checkpoints that do not quite fit, under vLLM."""

from __future__ import annotations

from unfitting import UnfittingCheckpoints


class TestCheckpoints(UnfittingCheckpoints):
    EXTRA = r"'model\.layers\.0\.mlp\.bonus\.weight' of .*model\.safetensors .* cannot be loaded .*no module"
