"""A docstring that refers to a module or a name of ours refers to one that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
PACKAGES = tuple(sorted(folder.name for folder in SOURCES.iterdir() if (folder / "__init__.py").is_file()))
REFERENCE = re.compile(r":(?:mod|class|func|data|attr|meth):`~?([\w.]+)`")


def path_of(module: str) -> Path | None:
    """Return the file of a module of ours; ``None`` if there is none."""
    path = SOURCES.joinpath(*module.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@cache
def names(file: Path) -> frozenset[str]:
    """Return a module's names, and members of its classes; ``Name.*`` where those may be in another module."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in bound(node)} | {f"{node.name}.*" for _ in node.bases}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {f"{alias.asname or alias.name}.*" for alias in node.names}
    return frozenset(found | bound(tree))


def bound(tree: ast.AST) -> set[str]:
    """Return the names, and the attributes of objects, that statements in a tree bind."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def exists(target: str) -> bool:
    """Whether a dotted name is a module of ours, a name in one, or a member of a class in one."""
    module, _, name = target, "", ""
    while (file := path_of(module)) is None:
        module, _, last = module.rpartition(".")
        name = f"{last}.{name}".rstrip(".")
    return not name or name in names(file) or f"{name.rpartition('.')[0]}.*" in names(file)


def meant(file: Path, target: str) -> str:
    """Return the dotted name that a reference in a file means; dots at the start are those of Python's imports."""
    dots = len(target) - len(target.lstrip("."))
    package = file.relative_to(SOURCES).parts[:-dots]
    return ".".join((*package, target[dots:])) if dots else target


@pytest.mark.parametrize("package", PACKAGES)
def test_every_reference_names_something(package: str) -> None:
    wrong = []
    for file in SOURCES.joinpath(package).rglob("*.py"):
        for target in REFERENCE.findall(file.read_text(encoding="utf-8")):
            if target.startswith((".", *(f"{ours}." for ours in PACKAGES))) and not exists(meant(file, target)):
                wrong.append(f"{file.relative_to(SOURCES)}: {target}")
    assert not wrong


def test_a_name_that_is_gone_is_found() -> None:
    here = SOURCES / "fl_dispatch/shadow/mode.py"
    assert exists(meant(here, "..state.State.wrapper"))
    assert exists(meant(here, ".origin"))
    assert not exists(meant(here, ".state.State.wrapper"))
    assert not exists("fl_dispatch.state.State.wrapped")
