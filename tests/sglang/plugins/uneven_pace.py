"""Ranks that measure differently: by the second rank's clock one step alone fits."""

from __future__ import annotations

from fl_dispatch import OpRegistry
from fl_dispatch.hosting.pace import Pace


def _fitting(pace: Pace, steps: int) -> int:
    from sglang.srt.runtime_context import get_parallel

    return steps if get_parallel().tp_rank == 0 else 1


def register_builtins(registry: OpRegistry) -> None:
    Pace.fitting = _fitting  # type: ignore[method-assign]
