"""The operators, one file a family, and the catalogue of them all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    activation,
    attention,
    elementwise,
    fused_linear,
    joined,
    linear,
    lora,
    mla,
    moe,
    normalization,
    quantization,
    quantized_moe,
    recurrent,
    rotary,
    routing,
    state_space,
)
from .declaration import (
    FEW_TERMS,
    STANDARD_TOLERANCE,
    Access,
    LayerForm,
    Mode,
    Operator,
    Place,
    Sample,
    Shape,
    Tolerance,
    Work,
    Workload,
    Write,
    operator,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        declared.name: declared
        for module in (
            linear,
            lora,
            quantization,
            elementwise,
            activation,
            normalization,
            rotary,
            attention,
            mla,
            recurrent,
            state_space,
            routing,
            moe,
            quantized_moe,
            joined,
            fused_linear,
        )
        for declared in vars(module).values()
        if isinstance(declared, Operator)
    }
)
"""Every declared operator by name."""

__all__ = [
    "FEW_TERMS",
    "OPERATORS",
    "STANDARD_TOLERANCE",
    "Access",
    "LayerForm",
    "Mode",
    "Operator",
    "Place",
    "Sample",
    "Shape",
    "Tolerance",
    "Work",
    "Workload",
    "Write",
    "operator",
]
