"""Where a value came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Args:
        source: ``default``, ``code``, ``environment variable NAME``, ``/path/x.yaml, line 3`` or
            ``cpu.yaml (platform), line 2``.
    """

    source: str

    def __str__(self) -> str:
        return self.source


DEFAULT = Origin("default")
CODE = Origin("code")
