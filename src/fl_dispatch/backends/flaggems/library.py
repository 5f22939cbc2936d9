"""Find FlagGems, and import it only at the first call, because the import opens devices and parent processes fork."""

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
"""Version of FlagGems → the newest Triton that its launcher supports.

``flag_gems/utils/libentry.py`` passes constants to a compiled kernel only for Triton 3.3 to 3.6. Newer versions expect
them too, so a kernel's second launch reads past its arguments and ends the process (seen with Triton 3.7.1 on an H200).
"""


@functools.cache
def why_missing() -> str:
    """Return why FlagGems cannot run on any device here, as a message, or an empty string. Imports nothing."""
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
    """Return why these versions of FlagGems and Triton do not work together; unknown versions are allowed."""
    newest = SERVED.get(gems)
    if newest is None or tuple(int(part) for part in triton.split(".")[:2] if part.isdigit()) <= newest:
        return ""
    last = ".".join(map(str, newest))
    return f"FlagGems {gems} ends the process with Triton {triton}: its launcher knows Triton up to {last}"


@functools.cache
def why_unavailable() -> str:
    """Return why FlagGems cannot run operators here, as a message, or an empty string. Creates no device context."""
    if missing := why_missing():
        return missing
    return why_unserved()


@functools.cache
def gems() -> Any:
    """Import FlagGems, and make its tuners keep their choices in this process, as Triton's tuners do.

    FlagGems stores choices in one file for all processes of the user, and the last timing wins. Ranks could then
    choose differently, and a configuration that ran untimed would count as the fastest from then on.
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
