"""Implementations that Dynamo can or cannot trace, as declared or found in a trial."""

from __future__ import annotations

from collections.abc import Mapping

from ..logger_manager import get_logger
from ..types import OpImpl

logger = get_logger(__name__)


class Traces:
    """Traceability of implementations. Owned by one manager."""

    def __init__(self) -> None:
        self._found: dict[OpImpl, str] = {}

    def obstacle(self, impl: OpImpl) -> str | None:
        """Return why Dynamo cannot trace an implementation; empty if it can, ``None`` while that is unknown."""
        if impl.opaque is not None:
            return "it is declared opaque" if impl.opaque else ""
        return self._found.get(impl)

    def add(self, impl: OpImpl, obstacle: str) -> str:
        """Record a trial's result and return the known one, because another thread's trial may have been first."""
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
        """Return implementations that Dynamo cannot trace according to a trial, and why."""
        return {impl: obstacle for impl, obstacle in list(self._found.items()) if obstacle}
