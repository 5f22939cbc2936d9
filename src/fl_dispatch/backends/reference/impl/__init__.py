"""Batch-invariant forms, and the references at the paths of document 000, such as ``impl.normalization.rms_norm``."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType

from fl_dispatch.ops import FAMILIES, Operator


def _references(family: ModuleType) -> ModuleType:
    """Make a module of functions for a family of operators, one reference an operator."""
    module = module_from_spec(ModuleSpec(f"{__name__}.{family.__name__.rpartition('.')[2]}", None))
    for name, value in vars(family).items():
        if not name.startswith("__"):
            setattr(module, name, value.reference if isinstance(value, Operator) else value)
    return module


for _module in map(_references, FAMILIES):
    sys.modules[_module.__name__] = _module
    globals()[_module.__name__.rpartition(".")[2]] = _module
