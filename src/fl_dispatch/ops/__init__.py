"""The operators, one file per family, and the catalogue of all operators."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    activation,
    attention,
    fused,
    fused_linear,
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
    sparse_mla,
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

FAMILIES = (
    linear,
    lora,
    quantization,
    activation,
    normalization,
    rotary,
    attention,
    mla,
    sparse_mla,
    recurrent,
    state_space,
    routing,
    moe,
    quantized_moe,
    fused,
    fused_linear,
)
"""The modules that declare operators, in the catalogue's order."""
OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        name: declared
        for family in FAMILIES
        for name, declared in vars(family).items()
        if isinstance(declared, Operator) and declared.reference.__module__ == family.__name__
    }
)
"""Every declared operator by name."""

__all__ = [
    "FAMILIES",
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
