"""The backends of this package: the reference, FlagGems, our Triton kernels, and ``backends/vendor``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial

from .backends import flaggems, reference, triton, vendor
from .discovery import Target, load_backend
from .registry import OpRegistry


def backends() -> list[Target]:
    """Return the built-in backends."""
    names = [reference.__name__, flaggems.__name__, triton.__name__]
    names += [f"{vendor.__name__}.{module.name}" for module in pkgutil.iter_modules(vendor.__path__) if module.ispkg]
    return [
        Target(name.rpartition(".")[2], "built in", partial(importlib.import_module, f"{name}.register_ops"), False)
        for name in names
    ]


def register_builtins(registry: OpRegistry) -> None:
    """Register the built-in backends, each completely or not at all; log a WARNING for one that fails."""
    for target in backends():
        load_backend(registry, target)
