"""Read a host's Python source without importing it: names that modules and classes define, and parameters.

Importing a host runs its platform detection and needs its requirements; reading its source needs only a folder.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr
"""The meaning of a name: a function, a class, or a value."""


@dataclass(frozen=True)
class Import:
    """A name that a module imports: the module it is from, and its name there (empty: the module itself)."""

    module: str
    name: str = ""


_CLASS = re.compile(r"^[ \t]*class\s+(\w+)[^(:]*\(([^)]*)\)", re.MULTILINE)
"""A class statement's name, and its bases as text."""
_ALIAS = re.compile(r"\b(\w+)\s+as\s+(\w+)")

Bound = dict[str, list[Definition | Import]]
"""Name → its possible meanings, the preferred one first: a later statement, or the one inside ``try``."""


class Module:
    """One source file.

    Args:
        name: its dotted name.
        file: where it is.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.package = name if file.name == "__init__.py" else name.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """Return the parsed file."""
        return ast.parse(self.file.read_text(encoding="utf-8"), str(self.file))

    @cached_property
    def names(self) -> Bound:
        """Return the names that its top level defines or imports, also under ``if`` and ``try``."""
        return _bound(self.tree.body, self.package)


@dataclass(frozen=True)
class Class:
    """A class of a host, and the module that defines it."""

    module: Module
    node: ast.ClassDef

    @property
    def path(self) -> str:
        """Return ``module:Class``."""
        return f"{self.module.name}:{self.node.name}"


class SourceTree:
    """The source of some packages.

    Args:
        packages: name of a top-level package → its folder.
    """

    def __init__(self, packages: Mapping[str, Path]) -> None:
        self.packages = packages
        self._modules: dict[str, Module | None] = {}
        self._bases: dict[str, list[Class]] = {}

    @classmethod
    def installed(cls, *names: str) -> SourceTree:
        """Return the packages that this environment would import; skip missing ones."""
        specs = {name: find_spec(name) for name in names}
        return cls({name: Path(spec.origin).parent for name, spec in specs.items() if spec is not None and spec.origin})

    def covers(self, module: str) -> bool:
        """Whether a module belongs to one of the packages."""
        return module.partition(".")[0] in self.packages

    def module(self, name: str) -> Module | None:
        """Return a module, or ``None``."""
        if name not in self._modules:
            self._modules[name] = self._open(name)
        return self._modules[name]

    def _open(self, name: str) -> Module | None:
        package, *parts = name.split(".")
        if package not in self.packages:
            return None
        place = self.packages[package].joinpath(*parts)
        files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
        return next((Module(name, file) for file in files if file.is_file()), None)

    def modules_deriving(self, package: str, names: Iterable[str]) -> Iterator[Module]:
        """Yield the modules of a package with text that may define a class derived from one of these.

        The text is not parsed, and names are compared without their modules, so some modules have no such class. A
        host's thousands of files are read once, and dozens of them are parsed.
        """
        folder = self.packages[package]
        files = {file: file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))}
        classes = [(file, name, bases) for file, text in files.items() for name, bases in _CLASS.findall(text)]
        mentions: dict[str, set[str]] = {}  # name → its aliases, and classes with it among their bases
        for _, name, bases in classes:
            for base in re.findall(r"\w+", bases):
                mentions.setdefault(base, set()).add(name)
        for text in files.values():
            for name, alias in _ALIAS.findall(text):
                mentions.setdefault(name, set()).add(alias)
        derived, pending = set[str](), list(names)
        while pending:
            if (name := pending.pop()) not in derived:
                derived.add(name)
                pending += mentions.get(name, ())
        chosen = dict.fromkeys(file for file, _, bases in classes if derived.intersection(re.findall(r"\w+", bases)))
        for file in chosen:
            parts = file.relative_to(folder).with_suffix("").parts
            module = self.module(".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts))))
            if module is not None:
                yield module

    # -- names --------------------------------------------------------------------------------------------------------

    def find(self, module: Module, dotted: str) -> tuple[Module, Definition] | None:
        """Return the meaning of a module's name, through imports; ``None`` if it is not defined here."""
        first, _, rest = dotted.partition(".")
        return self._follow(module, first, rest, frozenset())

    def _follow(
        self, module: Module, name: str, rest: str, seen: frozenset[tuple[str, str]]
    ) -> tuple[Module, Definition] | None:
        """Follow a name, and ``rest`` after it, through imports; ``seen``: names on the way, which end a circle."""
        if (module.name, name) in seen:
            return None
        seen |= {(module.name, name)}
        found = (self._follow_one(module, bound, rest, seen) for bound in module.names.get(name, ()))
        return next((place for place in found if place is not None), None)

    def _follow_one(
        self, module: Module, bound: Definition | Import, rest: str, seen: frozenset[tuple[str, str]]
    ) -> tuple[Module, Definition] | None:
        """Follow one of the meanings of a name."""
        if not isinstance(bound, Import):
            return (module, bound) if not rest else None
        submodule = self.module(f"{bound.module}.{bound.name}" if bound.name else bound.module)
        source = self.module(bound.module)
        if bound.name and source is not None and bound.name in source.names:
            return self._follow(source, bound.name, rest, seen)
        if submodule is None or not rest:
            return None
        first, _, further = rest.partition(".")
        nested = self.module(f"{submodule.name}.{first}") if further and first not in submodule.names else None
        if nested is not None:  # ``import a`` and then ``a.b.name``
            first, _, further = further.partition(".")
            return self._follow(nested, first, further, seen)
        return self._follow(submodule, first, further, seen)

    def class_at(self, path: str) -> Class | None:
        """Return the class at ``module:Class``, or ``None``."""
        module_name, _, name = path.partition(":")
        module = self.module(module_name)
        match None if module is None else self.find(module, name):
            case (found_in, ast.ClassDef() as node):
                return Class(found_in, node)
            case (found_in, ast.IfExp(body=ast.Name(id=chosen))):
                return self.class_at(f"{found_in.name}:{chosen}")
        return None

    # -- classes ------------------------------------------------------------------------------------------------------

    def bases(self, cls: Class) -> list[Class]:
        """Return a class's direct bases, as far as they are found."""
        if cls.path not in self._bases:
            found = []
            for base in cls.node.bases:
                plain = base.value if isinstance(base, ast.Subscript) else base  # without type parameters
                match self.find(cls.module, ast.unparse(plain)):
                    case (module, ast.ClassDef() as node) if node is not cls.node:
                        found.append(Class(module, node))
            self._bases[cls.path] = found
        return self._bases[cls.path]

    def ancestors(self, cls: Class) -> list[Class]:
        """Return the class and all its ancestors, nearest first."""
        found: dict[str, Class] = {}
        pending = [cls]
        while pending:
            current = pending.pop(0)
            if current.path not in found:
                found[current.path] = current
                pending += self.bases(current)
        return list(found.values())

    def subclasses(self, package: str, roots: tuple[str, ...]) -> list[Class]:
        """Return every top-level class of a package that derives from one of ``module:Class``."""
        found = []
        for module in self.modules_deriving(package, (root.partition(":")[2] for root in roots)):
            for node in chain.from_iterable(module.names.values()):
                if isinstance(node, ast.ClassDef):
                    cls = Class(module, node)
                    if any(base.path in roots for base in self.ancestors(cls)[1:]):
                        found.append(cls)
        return found

    # -- attributes ---------------------------------------------------------------------------------------------------

    def attribute(self, owner: str, name: str) -> Definition | None:
        """Return the member of a module, a class, or one of its instances under a name.

        Args:
            owner: ``module:Class``, or ``module``, including attributes that its functions set on objects.
            name: the name; for a module it may be dotted.
        """
        if ":" not in owner:
            module = self.module(owner)
            if module is None:
                return None
            found = self.find(module, name)
            return found[1] if found is not None else _assigned(module.tree).get(name)
        cls = self.class_at(owner)
        for base in () if cls is None else self.ancestors(cls):
            for own in _bound(base.node.body, base.module.package).get(name, ()):
                if not isinstance(own, Import):
                    return own
            if (given := _assigned(base.node).get(name)) is not None:
                return given
        return None


def _bound(body: list[ast.stmt], package: str) -> Bound:
    """Return the names that statements bind, each with its possible meanings, the last one first."""
    found: Bound = {}

    def bind(name: str, *meanings: Definition | Import) -> None:
        found[name] = [*meanings, *found.get(name, ())]

    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bind(node.name, node)
            case ast.Assign():
                for target in node.targets:
                    for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(part, ast.Name):
                            bind(part.id, node.value)
            case ast.AnnAssign(target=ast.Name(id=name)):
                bind(name, node.value or node.annotation)
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    bind(alias.asname or top, Import(alias.name if alias.asname else top))
            case ast.ImportFrom():
                levels = package.split(".")
                start = ".".join(levels[: len(levels) - node.level + 1]) if node.level else ""
                source = ".".join(filter(None, (start, node.module)))
                for alias in node.names:
                    bind(alias.asname or alias.name, Import(source, alias.name))
            case ast.If() | ast.Try() | ast.With():
                others = [getattr(node, "orelse", []), *(handler.body for handler in getattr(node, "handlers", []))]
                for branch in (*others, getattr(node, "finalbody", []), node.body):
                    for name, meanings in _bound(branch, package).items():
                        bind(name, *meanings)
    return found


def _assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the attributes that code sets on an object."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(), attr=name, ctx=ast.Store()):
                found[name] = node
            case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(name)), *_]):
                found[name] = node
    return found
