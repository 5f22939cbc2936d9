"""Which layers of a loaded model run through the dispatch core."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import Settings


@dataclass(frozen=True)
class Survey:
    """Which layers of a loaded model are ours.

    Args:
        host: the host's name, for messages.
        ours: class name → (operator, how many).
        native: class name → how many; layers that we have an operator for but the host's own code runs.
        attention: attention class name → how many layers.
    """

    host: str
    ours: dict[str, tuple[str, int]]
    native: dict[str, int]
    attention: dict[str, int]

    def describe(self) -> str:
        """One line for the log."""
        ours = ", ".join(f"{name} {count} ({op})" for name, (op, count) in self.ours.items()) or "none"
        native = ", ".join(f"{name} {count}" for name, count in self.native.items()) or "none"
        attention = ", ".join(f"{name} {count}" for name, count in self.attention.items()) or "none"
        return f"layers through fl_dispatch: {ours}; attention: {attention}; left to {self.host}'s own code: {native}"

    def refuse_native_run(self, settings: Settings) -> None:
        """Raise ``RuntimeError`` if nothing is ours although something could be: it must not go unnoticed."""
        if settings.policy.enabled and settings.oot_enabled and self.native and not self.ours:
            raise RuntimeError(
                f"no layer of this model runs through fl_dispatch, although it has {', '.join(self.native)}: a list or "
                f"an option of {self.host} leaves them all out; set VLLM_FL_OOT_ENABLED=0 if that is meant"
            )
