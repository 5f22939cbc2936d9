"""Names at the paths that the plugins' specification gives them, while the objects lie in a host's plugin."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def names_of(module: str, *names: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that imports ``module``, and so the host, when one of the names is read."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"no name {name!r} here; there are {', '.join(names)}, of {module}")
        return getattr(importlib.import_module(module), name)

    return get
