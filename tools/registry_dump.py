"""Print the implementations that the built-in backends register, one in each line.

``--against`` compares with the sources of another revision in this environment, and exits with 1 if they differ.
``--without`` leaves fields out, such as ``module`` after files were moved.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def dump() -> list[dict[str, Any]]:
    """Return every implementation of the built-in backends, by operator and in the order of registration."""
    import fl_dispatch  # which is not yet known when another revision's is asked for
    from fl_dispatch.builtin_ops import register_builtins
    from fl_dispatch.registry import OpRegistry

    expected = Path(os.environ.get("FL_DUMPED_SOURCES", ROOT / "src"))
    if not Path(fl_dispatch.__file__).is_relative_to(expected):
        raise SystemExit(f"fl_dispatch comes from {fl_dispatch.__file__}, not from {expected}")
    registry = OpRegistry()
    register_builtins(registry)
    return [
        {"op": op, "id": impl.impl_id, **_fields(registry, impl)}
        for op, impls in registry.snapshot().impls_by_op.items()
        for impl in impls
    ]


def _fields(registry: Any, impl: Any) -> dict[str, Any]:
    available, why = impl.availability()
    function = inspect.unwrap(getattr(impl.fn, "__func__", impl.fn))
    supports = impl.supports
    return {
        "kind": impl.kind.value,
        "vendor": impl.vendor,
        "priority": int(impl.priority),
        "properties": {key: repr(value) for key, value in sorted(impl.properties.items())},
        "requires": {key: repr(value) for key, value in sorted(impl.requires.items())},
        "device_types": impl.device_types,
        "opaque": impl.opaque,
        "signature": impl.signature,
        "convention": repr(registry.convention(impl)),
        "parameters": str(inspect.signature(impl.fn)),
        "function": function.__qualname__,
        "module": function.__module__,
        "supports": supports and supports.__qualname__,
        "supports_parameters": supports and str(inspect.signature(supports)),
        "available": available,
        "why": why,
    }


def main() -> int:
    """Print the dump, or its differences from another revision's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REVISION", help="compare with the sources of this revision")
    parser.add_argument("--without", nargs="*", default=[], metavar="FIELD", help="fields to leave out")
    given = parser.parse_args()
    lines = _lines(dump(), given.without)
    if given.against is None:
        print("\n".join(lines))
        return 0
    before = _lines(_dump_of(given.against), given.without)
    print("\n".join(difflib.unified_diff(before, lines, given.against, "now", lineterm="", n=0)))
    print(f"{len(before)} implementations in {given.against}, {len(lines)} now; equal: {before == lines}")
    return int(before != lines)


def _lines(rows: list[dict[str, Any]], without: list[str]) -> list[str]:
    return [json.dumps({key: value for key, value in row.items() if key not in without}) for row in rows]


def _dump_of(revision: str) -> list[dict[str, Any]]:
    """Return the dump of another revision's sources, from a separate process."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
            sources.extractall(folder, filter="data")
        sources_of = str(Path(folder, "src"))
        variables = {**os.environ, "PYTHONPATH": sources_of, "FL_DUMPED_SOURCES": sources_of}
        found = subprocess.run(
            [sys.executable, __file__], env=variables, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return [json.loads(line) for line in found.splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
