"""The layers of a loaded model that run through the dispatch core."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ...logger_manager import get_logger
from ...settings import Settings

logger = get_logger(__name__)


@dataclass(frozen=True)
class LayerChoice:
    """Layers of one class for which a host chooses a forward: the host's choice and ours.

    Args:
        layer: the class.
        count: number of layers.
        operators: our operators that they run, or could run.
        host: the host's choice, by its own name.
        kept: why the host's choice runs; empty if our operator does.
    """

    layer: str
    count: int
    operators: tuple[str, ...]
    host: str
    kept: str = ""


@dataclass(frozen=True)
class Survey:
    """The layers of a loaded model that run our operators or the host's code.

    Args:
        host: the host's name, for messages.
        ours: class name → (operator, number of layers).
        native: class name → number of layers that run the host's own code although we have an operator for them.
        attention: attention class name → number of layers.
        choices: the host's choices next to ours, from a host that also chooses among implementations.
    """

    host: str
    ours: dict[str, tuple[str, int]]
    native: dict[str, int]
    attention: dict[str, int]
    choices: tuple[LayerChoice, ...] = ()

    def describe(self) -> str:
        """Return one line for the log."""
        ours = ", ".join(f"{name} {count} ({op})" for name, (op, count) in self.ours.items()) or "none"
        native = ", ".join(f"{name} {count}" for name, count in self.native.items()) or "none"
        attention = ", ".join(f"{name} {count}" for name, count in self.attention.items()) or "none"
        return f"layers through fl_dispatch: {ours}; attention: {attention}; left to {self.host}'s own code: {native}"

    def as_data(self) -> dict[str, Any]:
        """Return a worker's report: ``layers`` and ``native_layers`` are class name → number of layers."""
        layers = {name: count for name, (_, count) in self.ours.items()}
        return {"layers": layers, "native_layers": self.native, "attention": self.attention}

    def refuse_native_run(self, settings: Settings) -> None:
        """Raise ``RuntimeError`` if no layer is ours although one could be, because the user must notice."""
        if settings.policy.enabled and settings.oot_enabled and self.native and not self.ours:
            raise RuntimeError(
                f"no layer of this model runs through fl_dispatch, although it has {', '.join(self.native)}: a list or "
                f"an option of {self.host} leaves them all out; set VLLM_FL_OOT_ENABLED=0 if that is meant"
            )


def count(ours: dict[str, tuple[str, int]], name: str, operator: str) -> None:
    """Count one more layer that runs our operator, see :attr:`Survey.ours`."""
    ours[name] = (operator, ours.get(name, ("", 0))[1] + 1)


def warn_of_unknown_layers(settings: Settings, known: Set[str]) -> None:
    """Log each name in the lists of out-of-tree layers that is neither a layer nor an operator of this package."""
    for listed in sorted({*(settings.oot_whitelist or ()), *settings.oot_blacklist} - known):
        logger.warning(
            "'%s' in the lists of out-of-tree layers has no effect: no layer of that name is replaced", listed
        )
