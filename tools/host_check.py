"""Whether a version of a host that nobody has installed still has what a plugin relies on.

    python tools/host_check.py vllm 0.33.0 [--wheel FILE | --source FOLDER] [--pip PYTHON]

Without a file or a folder the wheel is downloaded. It is read, not installed: no requirement of it is needed. The first
table has the facts that do not hold; each is to be settled before that version is served, so the exit status is 1. The
second has layer classes that the plugin neither replaces nor leaves to the host with a reason. They run the host's own
code, which is no error, so they do not change the exit status.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from unpack_python import unpack

from fl_dispatch.hosting.host_facts import Findings, check
from fl_dispatch.hosting.host_layers import Host
from fl_dispatch.hosting.host_source import Class, SourceTree

PLUGINS = {"vllm": "vllm_fl.host", "sglang": "sglang_fl.host"}


def host_of(package: str) -> Host:
    """What its plugin knows about a host."""
    found: Host = import_module(PLUGINS[package]).HOST
    return found


def download(package: str, version: str, folder: Path, python: str) -> Path:
    """Fetch a wheel, without what it requires, by the pip of an interpreter."""
    command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([python, "-m", "pip", *command, "--dest", str(folder), f"{package}=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def report(host: Host, version: str, findings: Findings, unjudged: Iterable[Class], console: Console) -> None:
    """Print both tables."""
    facts = Table("used by", "verb", "owner", "what is there", box=SIMPLE)
    for broken in findings.broken:
        facts.add_row(broken.fact.used_by, broken.fact.verb, broken.fact.owner, broken.what)
    console.print(f"{host.name} {version}: {findings.names} names looked at, {len(findings.broken)} do not hold")
    if findings.broken:
        console.print(facts)
    if findings.of_other_versions:
        console.print(f"Not looked at: {len(findings.of_other_versions)} facts of other versions")
    if findings.elsewhere:
        packages = sorted({fact.owner.partition(".")[0] for fact in findings.elsewhere})
        console.print(f"Not looked at: {len(findings.elsewhere)} facts about {', '.join(packages)}")
    layers = Table("class", "module", box=SIMPLE)
    found = list(unjudged)
    for cls in found:
        layers.add_row(cls.node.name, cls.module.name)
    console.print(f"Layer classes that are neither replaced nor left to {host.name} with a reason: {len(found)}")
    if found:
        console.print(layers)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 if a fact does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PLUGINS)
    parser.add_argument("version")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--wheel", type=Path, help="the wheel's file")
    given.add_argument("--source", type=Path, help="the package's folder")
    parser.add_argument("--pip", default=sys.executable, help="the interpreter whose pip downloads")
    asked = parser.parse_args(arguments)
    host = host_of(asked.package)
    with tempfile.TemporaryDirectory(prefix="host-check-") as folder:
        source = asked.source
        if source is None:
            wheel = asked.wheel or download(asked.package, asked.version, Path(folder), asked.pip)
            unpack(wheel, Path(folder, "unpacked"))
            source = Path(folder, "unpacked", host.package)
        tree = SourceTree({host.package: source})
        findings = check(host.facts, tree, asked.version)
        report(host, asked.version, findings, host.layers.unjudged(tree, host.package), Console(width=160))
    return 1 if findings.broken else 0


if __name__ == "__main__":
    sys.exit(main())
