"""A CPU that FlagGems has kernels for: the stand-in of the core's tests replaces this process's ATen operators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import flaggems_standin
from fl_dispatch.backends.flaggems.aten import replacement


def register_builtins(registry: Any) -> None:
    modules = flaggems_standin.modules()
    modules["flag_gems"].device = "cpu"  # type: ignore[attr-defined]
    sys.modules.update(modules)
    replacement.why_not = lambda settings, device: ""  # type: ignore[assignment]
