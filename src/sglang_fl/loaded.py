"""The package's knowledge of the model that a runner of SGLang's has loaded."""

from __future__ import annotations

from dataclasses import dataclass

from fl_dispatch.hosting.attached import Attached
from fl_dispatch.hosting.survey import Survey


@dataclass
class LoadedModel:
    """A loaded model.

    Args:
        survey: which of its layers are ours.
        undispatched: operator → layers that the first forward pass missed; ``None`` before it.
    """

    survey: Survey
    undispatched: dict[str, list[str]] | None = None


LOADED = Attached[LoadedModel]("fl_loaded")
"""The loaded model of a model runner."""
