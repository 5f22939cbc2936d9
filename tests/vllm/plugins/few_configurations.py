"""FlagGems tries two configurations of each kernel that it tunes, not up to 162: an engine that starts in less time.

An earlier tuning, with all of them, must not be found: ``FLAGGEMS_CACHE_DIR`` is an empty folder.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from fl_dispatch.backends.flaggems.aten import replacement

FEW = 2


def few(library: Any) -> Any:
    """Keep the smallest configurations of every kernel; returns FlagGems."""
    import triton

    for module in {fn.__module__ for _, fn, *_ in library._FULL_CONFIG}:
        for kernel in list(vars(sys.modules[module]).values()):
            layer = kernel
            while hasattr(layer, "fn"):  # entry, tuner, heuristics, the function itself
                if isinstance(layer, triton.runtime.Autotuner):
                    layer.configs = sorted(layer.configs, key=_size)[:FEW]
                layer = layer.fn
    return library


def _size(config: Any) -> int:
    """How much of a chip a configuration takes, roughly."""
    blocks = (value for value in config.kwargs.values() if isinstance(value, int) and value > 0)
    return math.prod(blocks) * max(1, config.num_stages or 1)


def register_builtins(registry: Any) -> None:
    original = replacement.gems
    replacement.gems = lambda: few(original())  # type: ignore[assignment]
