"""Models with state layers, and their drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import drafters
import quantized_checkpoints as checkpoints
from architectures import build_architecture
from drafting import LOOK_UP, Drafting, Models
from host_engines import Served
from quantized_checkpoints import SCHEMES
from quantized_states import SIZES
from running import expected_tokens

TIED = "lfm2"
"""A model with its embedding as the head; a random head hardly repeats a token, so most drafts would be wrong."""
WAYS: dict[str, dict[str, Any]] = {
    "mtp": {"num_speculative_tokens": 3},
    "ngram": {"num_speculative_tokens": 3, **LOOK_UP},
}
"""Drafting method → vLLM's further settings."""


class Run(NamedTuple):
    """The model, the drafting method, a scheme of the weights (empty: not quantized), and whether it is compiled."""

    model: str
    method: str
    scheme: str = ""
    compiled: bool = False

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.model, self.method, self.scheme, "compiled" if self.compiled else "")))

    def speculation(self) -> dict[str, Any]:
        """Return vLLM's configuration."""
        return {"method": self.method, **WAYS[self.method]}

    def build(self, folder: Path) -> Path:
        """Write the checkpoint, with its predictor if that drafts, into a new folder."""
        folder.mkdir()
        model = build_architecture(self.model, folder / "sure", **SIZES[self.model])
        if self.model != TIED:
            model = drafters.repeating(model, folder / "repeating")
        if self.method == "mtp":
            model = drafters.with_mtp_beside_states(model, folder / "predicting")
        if self.scheme:
            model = checkpoints.write_checkpoint(folder / "quantized", SCHEMES[self.scheme], model=model)
        return model


class DraftsForStates(Drafting):
    """Drafts under vLLM from a predictor of one more token that drafts several times, and from a look-up.

    A look-up has no drafts for some requests. The third prompt is read in chunks together with decoding requests, and
    the last prompt has one token.
    """

    PASSES = 2
    ALONE = True
    EXACT: ClassVar[Sequence[Run]] = ()
    """Runs with tokens that equal those of Hugging Face's network."""
    ENGINE: ClassVar[Mapping[str, Any]]

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {**super().cases(), "exact": self.EXACT}

    def models(self, run: Run, folder: Path) -> Models:
        model = run.build(folder)
        return Models(model, model, None)

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        engine = {**self.ENGINE, "enforce_eager": not (drafts and run.compiled)}
        return {**engine, "speculative_config": run.speculation()} if drafts else engine

    def least(self, run: Run) -> int:
        return 10 if run.model != TIED else -1

    def test_greedy_tokens_equal_hugging_face(
        self, exact: Run, made: Mapping[Any, Models], served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        assert self.greedy(served(exact)[0])[0] == expected_tokens(made[exact].plain)
