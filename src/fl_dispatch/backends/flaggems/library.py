"""Find FlagGems, and import it at the first call: the import looks at devices, and parents fork."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

from fl_dispatch.devices.triton import why_unserved

SERVED = {"5.0.2": (3, 6)}
"""Version of FlagGems → the newest Triton that its launcher serves.

``flag_gems/utils/libentry.py`` passes constants to a compiled kernel for Triton 3.3 to 3.6 alone. Newer ones take them
too, so a kernel's second launch reads past its arguments and ends the process (seen with Triton 3.7.1, on an H200).
"""


@functools.cache
def why_missing() -> str:
    """Why FlagGems cannot run on any device here, as a message, or an empty string. Imports nothing."""
    for package in ("flag_gems", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
        return "FlagGems is not run in Triton's interpreter"
    return _why_unserved(_version("flag_gems"), _version("triton"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _why_unserved(gems: str, triton: str) -> str:
    """Why a FlagGems must not be launched with a Triton, by their versions; one that is not known may."""
    newest = SERVED.get(gems)
    if newest is None or tuple(int(part) for part in triton.split(".")[:2] if part.isdigit()) <= newest:
        return ""
    last = ".".join(map(str, newest))
    return f"FlagGems {gems} ends the process with Triton {triton}: its launcher knows Triton up to {last}"


@functools.cache
def why_unavailable() -> str:
    """Why our operators cannot be FlagGems' here, as a message, or an empty string. Creates no device context."""
    if missing := why_missing():
        return missing
    return why_unserved()


@functools.cache
def gems() -> Any:
    """FlagGems itself; its tuners keep in this process what they choose, as Triton's do.

    Its own file answers for every process of the user and takes what was timed last. So ranks could not agree, and a
    configuration that ran untimed would count as the fastest from then on.
    """
    found = importlib.import_module("flag_gems")
    try:
        entry: Any = importlib.import_module("flag_gems.utils.libentry")
        kept, kind = entry.libcache, entry.LibTuner
    except (ImportError, AttributeError):  # another version's
        return found
    kept.get_config = lambda table: {}
    kept.get_benchmark = lambda table, key: {}
    for tuner in gc.get_objects():
        if issubclass(type(tuner), kind):
            tuner.cache = {}
    return found
