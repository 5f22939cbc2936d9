"""Registers the references, and batch-invariant forms of some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fl_dispatch.backends.base import Registry
from fl_dispatch.devices import CPU
from fl_dispatch.types import BackendImplKind, BackendPriority

from .impl.invariant import supports_row
from .invariant import InvariantBackend
from .reference import ReferenceBackend

WAITS = (
    "kv_cache_write",
    "rotary_embedding_kv_cache_write",
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
INVARIANT = ("rotary_embedding", "kv_cache_write", "rotary_embedding_kv_cache_write")
"""The references whose rows do not depend on the batch: products, sums and differences of two numbers, and copies."""


def register_builtins(registry: Registry) -> None:
    """Register ``reference.torch`` for every declared operator that computes something.

    ``reference.invariant`` runs only where the policy asks for batch invariance.
    """
    found = ReferenceBackend().implementations(
        BackendImplKind.REFERENCE, "reference.torch", BackendPriority.REFERENCE, opaque=False
    )
    invariant = InvariantBackend().implementations(
        BackendImplKind.REFERENCE,
        "reference.invariant",
        BackendPriority.REFERENCE,
        supports=dict.fromkeys(("rms_norm", "gemma_rms_norm", "layer_norm"), supports_row),
        properties={"batch_invariant": True, "only_batch_invariant": True},
        opaque=True,  # Inductor would fuse, and choose other sums
        device_types=(CPU.torch_type,),
    )
    registry.register_many([*(replace(impl, properties=_properties(impl.op_name)) for impl in found), *invariant])


def _properties(op_name: str) -> dict[str, Any]:
    graphs = {"graphs": False} if op_name in WAITS else {}
    return {**graphs, "batch_invariant": True} if op_name in INVARIANT else graphs
