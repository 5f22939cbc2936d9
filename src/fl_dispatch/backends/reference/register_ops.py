"""Registers the references."""

from __future__ import annotations

from dataclasses import replace

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, BackendPriority

from .reference import ReferenceBackend

WAITS = (
    "kv_cache_write",
    "paged_attention",
    "mla_decode",
    "mla_prefill",
    "causal_conv1d",
    "gated_delta_rule",
    "selective_scan",
    "fused_moe",
    "scaled_moe",
    "weight_only_moe",
)
"""The references that read numbers back from the device, so that no graph can hold them."""


def register_builtins(registry: Registry) -> None:
    """Register ``reference.torch`` for every declared operator that computes something."""
    found = ReferenceBackend().implementations(
        BackendImplKind.REFERENCE, "reference.torch", BackendPriority.REFERENCE, opaque=False
    )
    registry.register_many(
        [replace(impl, properties={"graphs": False}) if impl.op_name in WAITS else impl for impl in found]
    )
