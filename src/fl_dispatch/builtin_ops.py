"""The backends that come with this package: the reference, FlagGems, our Triton kernels, ``backends/vendor``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial

from .backends import flaggems, reference, triton, vendor
from .discovery import Target, load_backend
from .registry import OpRegistry


def backends() -> list[Target]:
    """The built-in backends."""
    names = [reference.__name__, flaggems.__name__, triton.__name__]
    names += [f"{vendor.__name__}.{module.name}" for module in pkgutil.iter_modules(vendor.__path__) if module.ispkg]
    return [
        Target(name.rpartition(".")[2], "built in", partial(importlib.import_module, f"{name}.register_ops"), False)
        for name in names
    ]


def register_builtins(registry: OpRegistry) -> None:
    """Register the built-in backends, each completely or not at all; one that fails is a WARNING."""
    for target in backends():
        load_backend(registry, target)
