"""Origins of values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Args:
        source: ``default``, ``code``, ``environment variable NAME``, ``/path/x.yaml, line 3``,
            ``cpu.yaml (platform), line 2`` or ``/path/cpu-x.yaml (platform, your own), line 2``.
    """

    source: str

    @property
    def shipped(self) -> bool:
        """Whether the origin is this package: a built-in default, or a shipped platform file."""
        return self.source == "default" or "(platform)" in self.source

    @property
    def platform(self) -> bool:
        """Whether the origin is a platform's file, shipped or the user's own."""
        return "(platform" in self.source

    def __str__(self) -> str:
        return self.source


DEFAULT = Origin("default")
CODE = Origin("code")
