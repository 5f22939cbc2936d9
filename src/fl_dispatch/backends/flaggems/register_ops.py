"""Registers FlagGems."""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority

from .flaggems import FlagGemsBackend
from .impl import operators


def register_builtins(registry: Registry) -> None:
    """Register ``default.flagos`` for every operator that FlagGems has."""
    registry.register_many(
        FlagGemsBackend().implementations(
            BackendImplKind.DEFAULT,
            "default.flagos",
            BackendPriority.DEFAULT,
            supports={
                "silu_and_mul": operators.supports_activation,
                "gelu_and_mul": operators.supports_activation,
                "rms_norm": operators.supports_rms_norm,
                "rotary_embedding": operators.supports_rotary_embedding,
                "topk_softmax": operators.supports_topk_softmax,
                "moe_sum": operators.supports_moe_sum,
            },
            opaque=True,  # it launches through layers of Python that Dynamo does not follow
            device_types=("cuda",),
        )
    )
