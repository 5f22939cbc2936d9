"""State that the plugin keeps on SGLang's runners: a loaded model, and graphs of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.layers.survey import Survey


@dataclass
class LoadedModel:
    """A loaded model.

    Args:
        survey: its layers that are ours.
        undispatched: operator → layers that the first forward pass missed; ``None`` before it.
        served: whether a batch of SGLang's scheduler has run.
    """

    survey: Survey
    undispatched: dict[str, list[str]] | None = None
    served: bool = False


LOADED = Attached[LoadedModel]("fl_loaded")
"""The loaded model of a model runner."""


@dataclass
class PromptGraphs:
    """Prompt graphs: whether they were captured, and how many steps replayed one."""

    captured: bool = False
    replays: int = 0


PROMPT_GRAPHS = Attached[PromptGraphs]("fl_prompt_graphs")
"""The prompt graphs of SGLang's runner."""
