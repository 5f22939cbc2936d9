"""The evidence in a package, signed by hash: ``fl doctor`` reports files that were changed after they were proven.

A hash shows that a file was changed, but not who proved it: the author of a change can also rewrite the evidence.
``fl verify`` proves it again on any installation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GROUP = "fl_dispatch.evidence"
"""Entry points of packages with evidence; each names a module, with the evidence in its folder."""
FILE = "evidence.json"
UNCHECKED = b"\1\0\0\0"
"""The flags of cached bytecode that Python runs without a look at the module's source."""


@dataclass(frozen=True)
class Evidence:
    """A package's statement about itself.

    Args:
        name: the entry point's name.
        said: operator, device, date and speed of the proof.
        problem: how its files differ from those that were proven, or empty.
    """

    name: str
    said: str
    problem: str = ""


def sign(folder: Path, data: Mapping[str, Any]) -> None:
    """Write the evidence next to its modules, with their hashes and its own."""
    whole = {**data, "files": _files(folder)}
    text = json.dumps({**whole, "sha256": _hash(whole)}, indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def check(name: str, folder: Path) -> Evidence:
    """Compare a package with its evidence."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        told = {key: value for key, value in data.items() if key != "sha256"}
        said = f"{data['operator']}: {data['said']}, {data['machine']['device']}, {data['machine']['date']}"
        files, own = data["files"], data["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Evidence(name, "", f"its {FILE} cannot be read: {type(error).__name__}: {error}")
    if own != _hash(told):
        return Evidence(name, said, f"its {FILE} was changed after it was written")
    now = _files(folder)
    changed = sorted(file for file in {*files, *now} if files.get(file) != now.get(file))
    return Evidence(name, said, f"{', '.join(changed)} changed after the proof; prove it again" if changed else "")


def installed() -> Iterator[Evidence]:
    """Yield the evidence of every installed package, importing only the top of each."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        spec = find_spec(point.value)
        places = list(spec.submodule_search_locations or ()) if spec else []
        yield check(point.name, Path(places[0])) if places else Evidence(point.name, "", f"no module {point.value}")


def _files(folder: Path) -> dict[str, str]:
    """Return file → hash, without the evidence and Python's caches; a library or a folder may replace a module."""
    files = {
        file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file() or file.is_symlink()
    }
    kept = {name: _read(file) for name, file in files.items()}
    return {
        name.as_posix(): hashlib.sha256(text).hexdigest()
        for name, text in kept.items()
        if name.as_posix() != FILE and ("__pycache__" not in name.parts or text[4:8] == UNCHECKED)
    }


def _read(file: Path) -> bytes:
    """Return a file's bytes; for a link to a folder or to nothing, the place that it names."""
    return file.read_bytes() if file.is_file() else os.fsencode(os.readlink(file))


def _hash(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
