"""Which entries of a tuned file are valid: its evidence names the versions, driver and chip of its measurement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fl_dispatch import devices
from fl_dispatch.errors import ConfigError
from fl_dispatch.version import __version__

from . import platforms
from .document import read_json
from .place import Place, printable

PROVIDERS = "providers"
"""Key of the evidence: operator → package → version."""
DRIVER = "driver"
"""Key of the evidence: the driver's version."""
MACHINE = "machine"
"""Key of the evidence: the machine; its device is the chip's name."""
OURS = "fl-dispatch"
EVERY = "every operator"
"""Stands for all operators in :func:`stale_entries`."""
BACKENDS = Path(__file__).parents[1] / "backends"


def stale_entries(file: Path) -> dict[str, str]:
    """Return operator → what changed since it was tuned, such as ``torch 2.11.0, now 2.13.0``.

    Another chip or driver makes every operator stale, also one that was not tuned. Empty for a file without evidence
    next to it, which ``fl tune`` did not write.
    """
    evidence = platforms.evidence_path(file)
    if not evidence.is_file():
        return {}
    place = Place(str(evidence))
    try:
        data = read_json(str(evidence), place, MOST_BYTES)
        providers = {str(op): dict(versions) for op, versions in data[PROVIDERS].items()}
        chip, driver = str(data[MACHINE]["device"]), str(data[DRIVER])
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        return {EVERY: f"its evidence {printable(str(evidence))} cannot be read: {error}"}
    device = devices.detect_device()
    common = _changed("the chip", chip, device.device_name(0)), _changed("the driver", driver, device.driver_version())
    if any(common):
        return {EVERY: "; ".join(filter(None, common))}
    found = {}
    for op_name, versions in providers.items():
        changes = (_changed(package, version, installed(package)) for package, version in versions.items())
        if why := "; ".join(filter(None, changes)):
            found[op_name] = why
    return found


MOST_BYTES = 1 << 24
"""Bytes of an evidence file, which holds every repeat of every candidate."""


def installed(package: str) -> str:
    """Return the version of an installed package, for ours with a hash of its kernels; empty if it is missing."""
    if package == OURS:
        return f"{__version__} ({_kernels()})"
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):  # the latter for what is no name
        return ""


@cache
def _kernels() -> str:
    """Return a short hash of the source of our implementations."""
    found = (path for path in BACKENDS.rglob("[!.]*") if path.suffix in (".py", ".cpp", ".h"))
    files = sorted(path for path in found if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _changed(what: str, then: Any, now: str) -> str:
    return "" if str(then) == now else f"{printable(what)} {printable(str(then))}, now {now or 'missing'}"


def in_words(entries: Mapping[str, str]) -> str:
    """Return stale entries in one line, grouping operators with the same reason."""
    reasons: dict[str, list[str]] = {}
    for op_name, why in entries.items():
        reasons.setdefault(why, []).append(printable(op_name))
    return "; ".join(f"{', '.join(ops)} ({why})" for why, ops in reasons.items())
