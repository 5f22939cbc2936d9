"""Installed distributions made by tests: metadata in a folder for ``sys.path``; the modules exist already."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, entry_points: str, version: str = "0") -> Path:
    """Write a distribution's metadata into a folder; ``entry_points`` is the text of ``entry_points.txt``."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    return folder
