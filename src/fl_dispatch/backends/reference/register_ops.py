"""Register the references, and the batch-invariant forms that some operators have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fl_dispatch.backends.base import Registry
from fl_dispatch.devices import CPU
from fl_dispatch.ops import OPERATORS, Operator
from fl_dispatch.types import BackendImplKind, BackendPriority

from .impl.invariant import supports_row
from .invariant import InvariantBackend
from .reference import ReferenceBackend


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
        opaque=True,  # Inductor would fuse operators and change the order of sums
        device_types=(CPU.torch_type,),
    )
    registry.register_many(
        [*(replace(impl, properties=_properties(OPERATORS[impl.op_name])) for impl in found), *invariant]
    )


def _properties(operator: Operator) -> dict[str, Any]:
    graphs = {"graphs": False} if operator.waits else {}
    return {**graphs, "batch_invariant": True} if operator.batch_invariant else graphs
