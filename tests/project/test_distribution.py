"""The distribution: what its archives hold, and what its metadata says."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

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


def test_an_environment_beside_the_sources_leaves_no_file_and_hides_none(tmp_path: Path) -> None:
    """An environment may link to folders of the sources, and hatchling walks through a folder once."""
    project = tmp_path / "project"
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "src/fl_dispatch/version.py"):
        if (ROOT / name).exists():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, project / name)
    sources = project / "tests" / "core"
    sources.mkdir(parents=True)
    (sources / "test_one.py").touch()
    for number in range(100):
        environment = project / f".venv-{number}"
        environment.mkdir()
        (environment / "own.py").touch()
        (environment / "tests").symlink_to(sources)
        order = os.listdir(project)  # as hatchling walks
        if order.index(environment.name) < order.index("tests"):
            break
    else:
        pytest.skip("this file system lists environments last")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], cwd=project, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert "tests/core/test_one.py" in names
    assert not {name for name in names if ".venv" in name}


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name.partition("/")[0] for name in listed.splitlines()}
