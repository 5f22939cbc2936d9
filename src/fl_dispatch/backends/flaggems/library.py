"""Finds FlagGems, and imports it at the first call: the import looks at devices, and parents fork."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

from fl_dispatch.devices.triton import why_unserved


@functools.cache
def why_missing() -> str:
    """Why FlagGems cannot run on any device here, as a message, or an empty string. Imports nothing."""
    for package in ("flag_gems", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
        return "FlagGems is not run in Triton's interpreter"
    return ""


@functools.cache
def why_unavailable() -> str:
    """Why our operators cannot be FlagGems' here, as a message, or an empty string. Creates no device context."""
    if missing := why_missing():
        return missing
    return why_unserved()


@functools.cache
def gems() -> Any:
    """FlagGems itself."""
    return importlib.import_module("flag_gems")
