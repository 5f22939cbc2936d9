"""A vendor's package for a chip of its own over the emulated NPU, from ``fl new-backend nimbus --device npu``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fl_dispatch.cli.new_backend import write_package

KERNELS = {"silu_and_mul", "rms_norm", "rotary_embedding", "kv_cache_write", "paged_attention"}


def make_package(folder: Path) -> Path:
    """Write the package into a new folder, which is an installed distribution for who has it on its path."""
    package = folder / "nimbus-fl"
    write_package("nimbus", package, "npu")
    _install(package)
    return package


def _install(package: Path) -> None:
    """Give the folder of a package what its installation would: a distribution with the entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    distribution = package / f"nimbus_fl-{project['version']}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    (distribution / "entry_points.txt").write_text("\n".join(lines) + "\n")
