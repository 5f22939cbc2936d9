"""Models with layers that keep a state, and what drafts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import drafters
import quantized_checkpoints as checkpoints
from architectures import build_architecture
from quantized_checkpoints import SCHEMES
from quantized_states import SIZES

TIED = "lfm2"
"""A model with its embedding as the head: a random one hardly repeats a token, so that most drafts are wrong."""
WAYS: dict[str, dict[str, Any]] = {
    "mtp": {"num_speculative_tokens": 3},
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
}
"""Who drafts, and vLLM's further words for it."""


class Run(NamedTuple):
    """The model, who drafts, a scheme of the weights (empty: not quantized), and whether it is compiled."""

    model: str
    method: str
    scheme: str = ""
    compiled: bool = False

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.model, self.method, self.scheme, "compiled" if self.compiled else "")))

    def speculation(self) -> dict[str, Any]:
        """vLLM's configuration."""
        return {"method": self.method, **WAYS[self.method]}

    def build(self, folder: Path) -> Path:
        """Write the checkpoint, with its predictor if that drafts, into a folder that is not there yet."""
        folder.mkdir()
        model = build_architecture(self.model, folder / "sure", **SIZES[self.model])
        if self.model != TIED:
            model = drafters.repeating(model, folder / "repeating")
        if self.method == "mtp":
            model = drafters.with_mtp_beside_states(model, folder / "predicting")
        if self.scheme:
            model = checkpoints.write_checkpoint(folder / "quantized", SCHEMES[self.scheme], model=model)
        return model
