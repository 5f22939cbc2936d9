"""Registers the references."""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority

from .reference import ReferenceBackend


def register_builtins(registry: Registry) -> None:
    """Register ``reference.torch`` for every declared operator that computes something."""
    backend = ReferenceBackend()
    registry.register_many(
        backend.implementations(BackendImplKind.REFERENCE, "reference.torch", BackendPriority.REFERENCE, opaque=False)
    )
