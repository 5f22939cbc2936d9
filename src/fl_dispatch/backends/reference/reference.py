"""The reference backend."""

from __future__ import annotations

from fl_dispatch.backends.base import Backend
from fl_dispatch.ops import OPERATORS


class ReferenceBackend(Backend):
    """Every declared operator in plain PyTorch, as :attr:`fl_dispatch.ops.Operator.reference` has it."""

    @property
    def name(self) -> str:
        """``reference``."""
        return "reference"


for _operator in OPERATORS.values():
    if not _operator.selection:
        setattr(ReferenceBackend, _operator.name, staticmethod(_operator.reference))
