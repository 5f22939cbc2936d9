"""Methods and attributes of a host that a plugin's classes override, derived from the plugin's source.

A plugin's class that derives from a host's class overrides every public name in its body, or in the body of one of our
mixins, because other names begin with ``fl_`` or ``_``. Annotated fields of dataclasses and ``__names__`` are not
overrides. A plugin's facts list the exceptions: overridden private names, and added public ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .fact import parameters
from .source import Class, Import, Module, SourceTree

OLDER = re.compile(r"v\d+(_\d+)+")
"""The name of a folder or module that is for one older version of a host."""


@dataclass(frozen=True)
class Overrides:
    """One class of a plugin that derives from a host's.

    Args:
        owner: ``module:Class`` of the host's class that it derives from, as the plugin imports it.
        user: the plugin's module, below its package.
        why: the first line of the class's docstring, or a mixin's.
        names: each name that it or a mixin defines → the name, of a method with its parameters without ``self``.
    """

    owner: str
    user: str
    why: str
    names: dict[str, str]

    @property
    def public(self) -> list[str]:
        """Return the names that override the host's by the rule."""
        return [name for name in self.names if not name.startswith(("_", "fl_"))]


def overrides(package: str, folder: Path, host: str) -> Iterator[Overrides]:
    """Yield every class of a plugin, at the top level of a module, that derives from a class of the host.

    Folders and modules for one older version, such as ``v0_5_21``, are skipped, because their facts are written by
    hand.

    Args:
        package, folder: the plugin's package.
        host: the host's package.
    """
    tree = SourceTree({package: folder})
    for file in sorted(folder.rglob("*.py")):
        parts = [part for part in file.relative_to(folder).with_suffix("").parts if part != "__init__"]
        module = tree.module(".".join((package, *parts)))
        for node in () if module is None else chain.from_iterable(module.names.values()):
            if module is not None and isinstance(node, ast.ClassDef) and not _is_older(module):
                owners, bodies = _lineage(tree, Class(module, node), host)
                names = {name: call for body in reversed(bodies) for name, call in _names(body).items()}
                why = next(filter(None, map(ast.get_docstring, bodies)), "").partition("\n")[0]
                yield from (
                    Overrides(owner, ".".join(parts) or "__init__", why, names) for owner in dict.fromkeys(owners)
                )


def _is_older(module: Module) -> bool:
    return any(OLDER.fullmatch(part) for part in module.name.split("."))


def _lineage(tree: SourceTree, ours: Class, host: str) -> tuple[list[str], list[ast.ClassDef]]:
    """Return the host's classes that our class derives from, and our bodies: its own, and its mixins'."""
    owners: list[str] = []
    bodies = [ours.node]
    for base in ours.node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        for found in _meanings(tree, ours.module, ast.unparse(plain), host):
            if isinstance(found, str):
                owners.append(found)
                continue
            above, mixed_in = _lineage(tree, found, host)
            owners += above
            bodies += () if above else mixed_in
    return owners, bodies


def _meanings(tree: SourceTree, module: Module, dotted: str, host: str) -> Iterator[str | Class]:
    """Yield what a name means in one of our modules: ``module:Class`` of the host, or our own class."""
    first, _, rest = dotted.partition(".")
    for bound in module.names.get(first, ()):
        match bound:
            case Import(source, name) if source.partition(".")[0] == host:
                *above, last = filter(None, (name, *rest.split(".")))
                yield f"{'.'.join((source, *above))}:{last}"
            case Import(source, name):
                inner, whole = tree.module(source), tree.module(f"{source}.{name}")
                if inner is not None and name in inner.names:
                    yield from _meanings(tree, inner, ".".join(filter(None, (name, rest))), host)
                elif whole is not None and rest:
                    yield from _meanings(tree, whole, rest, host)
            case ast.ClassDef() if not (rest or _is_older(module)):
                yield Class(module, bound)


def _names(node: ast.ClassDef) -> dict[str, str]:
    """Return the names that a class's body defines, methods with their parameters."""
    names: dict[str, str] = {}
    for part in node.body:
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in part.decorator_list)
                names[name] = name if is_property else f"{name}({ast.unparse(parameters(part, bound=True))})"
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=same)) if same in names:
                names[name] = names[same].replace(same, name, 1)
            case ast.Assign():
                names |= {target.id: target.id for target in part.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)) if "ClassVar" in ast.unparse(part.annotation):
                names[name] = name
    return {name: call for name, call in names.items() if not name.endswith("__")}
