"""The planted faults of ``index_topk``, each as an implementation that a policy has to name."""

import sys
from pathlib import Path

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.ops import OPERATORS

sys.path.append(str(Path(__file__).parents[2] / "core/evidence"))

from planted_faults import FAULTS

OPERATOR = OPERATORS["index_topk"]


def _of_declared_parameters(fault):
    implementation = fault.implementation()
    declared = [one for one in OPERATOR.signature.parameters.values() if one.name not in OPERATOR.hints]
    implementation.__signature__ = OPERATOR.signature.replace(parameters=declared)
    return implementation


def impl_id(fault):
    return "vendor.planted." + fault.name.replace(" ", "-")


def register_builtins(registry):
    registry.register_many(
        OpImpl(fault.op, impl_id(fault), BackendImplKind.VENDOR, _of_declared_parameters(fault), vendor="planted")
        for fault in FAULTS
        if fault.op == OPERATOR.name
    )
