"""The distribution: what its archives hold, and what its metadata says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION = {"typing_extensions": "typing-extensions", "yaml": "pyyaml", "zmq": "pyzmq"}
"""Module → distribution, where the names differ."""
BY_HOSTS = {"sglang", "transformers", "vllm"}
"""Hosts, and packages that they bring along and that only modules for them import."""


def test_every_module_that_is_imported_at_import_is_declared() -> None:
    declared = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    for extra in PROJECT["optional-dependencies"].values():
        declared |= {re.split(r"[<>=\[ ]", requirement)[0] for requirement in extra}
    missing = {}
    for file in (ROOT / "src").rglob("*.py"):
        for module in _imported(ast.parse(file.read_text())):
            ours = {*sys.stdlib_module_names, "fl_dispatch", "fl_transfer", "vllm_fl", "sglang_fl", *BY_HOSTS}
            if module not in ours and DISTRIBUTION.get(module, module) not in declared:
                missing[module] = str(file.relative_to(ROOT))
    assert missing == {}


def _imported(tree: ast.Module) -> set[str]:
    """The packages of a module's absolute imports that run when it is imported."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_the_source_archive_has_what_its_tests_and_ci_read(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {Path(name).parts[1] for name in opened.getnames() if len(Path(name).parts) > 1}
    kept = {name for name in _tracked() if name != ".gitignore"}
    assert kept - names == set()


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name.partition("/")[0] for name in listed.splitlines()}
