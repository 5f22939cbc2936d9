"""Implementations that Dynamo can trace, and those that it cannot: as declared, else as a trial found."""

from __future__ import annotations

from collections.abc import Mapping

from ..logger_manager import get_logger
from ..types import OpImpl

logger = get_logger(__name__)


class Traces:
    """The knowledge about tracing implementations. Owned by one manager."""

    def __init__(self) -> None:
        self._found: dict[OpImpl, str] = {}

    def obstacle(self, impl: OpImpl) -> str | None:
        """Why Dynamo cannot trace an implementation; empty if it can, ``None`` while it is unknown."""
        if impl.opaque is not None:
            return "it is declared opaque" if impl.opaque else ""
        return self._found.get(impl)

    def add(self, impl: OpImpl, obstacle: str) -> str:
        """Keep what a trial found. Returns what is known: a trial in another thread may have been first."""
        known = self._found.setdefault(impl, obstacle)
        if known is obstacle and obstacle:
            logger.info(
                "Compiled code calls '%s' of op '%s' behind an opaque view, because Dynamo cannot trace it: %s",
                impl.impl_id,
                impl.op_name,
                obstacle,
            )
        return known

    def untraceable(self) -> Mapping[OpImpl, str]:
        """The implementations of which a trial found that Dynamo cannot trace them, and why."""
        return {impl: obstacle for impl, obstacle in list(self._found.items()) if obstacle}
