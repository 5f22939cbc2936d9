"""Whether a tuned file is still valid: its evidence names the versions, driver and chip of its measurement."""

from __future__ import annotations

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


def stale_entries(file: Path) -> dict[str, str]:
    """Return operator → what changed since it was tuned, such as ``torch 2.11.0, now 2.13.0``.

    Empty for a file without evidence next to it, which ``fl tune`` did not write.
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
        return {"every operator": f"its evidence {printable(str(evidence))} cannot be read: {error}"}
    device = devices.detect_device()
    common = [_changed("the chip", chip, device.device_name(0)), _changed("the driver", driver, device.driver())]
    found = {}
    for op_name, versions in providers.items():
        own = [_changed(package, version, installed(package)) for package, version in versions.items()]
        if changes := [change for change in (*common, *own) if change]:
            found[op_name] = "; ".join(changes)
    return found


MOST_BYTES = 1 << 24
"""Bytes of an evidence file, which holds every repeat of every candidate."""


def installed(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return __version__ if package == OURS else ""


def _changed(what: str, then: Any, now: str) -> str:
    return "" if str(then) == now else f"{what} {printable(str(then))}, now {now or 'missing'}"


def in_words(entries: dict[str, str]) -> str:
    """Return stale entries in one line, grouping operators with the same reason."""
    reasons: dict[str, list[str]] = {}
    for op_name, why in entries.items():
        reasons.setdefault(why, []).append(op_name)
    return "; ".join(f"{', '.join(ops)} ({why})" for why, ops in reasons.items())
