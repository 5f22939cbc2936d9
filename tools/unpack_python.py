"""Unpack a wheel's Python files, data and metadata, without its libraries: ``python unpack_python.py WHEEL FOLDER``.

C++ headers come along, because SGLang looks for the folder of its own at import.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path, PurePosixPath

SUFFIXES = {".py", ".json", ".jinja", ".txt", ".h", ".cuh"}


def unpack(wheel: Path, folder: Path) -> int:
    """Unpack the wheel and return the number of written files."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _wanted(PurePosixPath(name))]
        archive.extractall(folder, names)
    return len(names)


def _wanted(name: PurePosixPath) -> bool:
    in_metadata = name.parts[0].endswith(".dist-info")
    return in_metadata or name.suffix in SUFFIXES


if __name__ == "__main__":
    print(unpack(Path(sys.argv[1]), Path(sys.argv[2])), "files")
