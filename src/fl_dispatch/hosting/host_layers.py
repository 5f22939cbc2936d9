"""Which layer classes of a host run our operators, and which stay the host's on purpose; the rest nobody has judged."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from .host_facts import HostFact
from .host_source import Class, SourceTree


@dataclass(frozen=True)
class HostLayers:
    """What a plugin says about its host's layer classes.

    Args:
        roots: ``module:Class`` of the classes that the host's exchangeable layers derive from.
        replaced: ``module:Class`` of those whose forward is ours.
        left: why others stay the host's: a class's name, or the dotted name of a module for all classes below it.
        inherited: a subclass gets what its base has, unless it has a forward of its own; else each class is replaced
            by its exact name.
    """

    roots: tuple[str, ...]
    replaced: frozenset[str]
    left: Mapping[str, str]
    inherited: bool

    @property
    def names(self) -> frozenset[str]:
        """The classes that a user's list may name."""
        return frozenset({path.partition(":")[2] for path in self.replaced} | {n for n in self.left if "." not in n})

    def unjudged(self, tree: SourceTree, package: str) -> list[Class]:
        """The classes of a host that are neither replaced nor left to it."""
        return [cls for cls in tree.subclasses(package, self.roots) if not self._is_judged(cls, tree)]

    def _is_judged(self, cls: Class, tree: SourceTree) -> bool:
        for base in tree.ancestors(cls) if self.inherited else [cls]:
            if base.path in self.replaced or self._is_left(base):
                return True
            if not _only_wraps(base):
                return False
        return False

    def _is_left(self, cls: Class) -> bool:
        modules = [name for name in self.left if "." in name]
        return cls.node.name in self.left or any(f"{cls.module.name}.".startswith(f"{name}.") for name in modules)


def _only_wraps(cls: Class) -> bool:
    """Whether a class has no forward, or one that calls its base's."""
    forwards = [node for node in cls.node.body if isinstance(node, ast.FunctionDef) and node.name.startswith("forward")]
    aliases = [
        target.id
        for node in cls.node.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith("forward")
    ]
    wrapped = all(node.name == "forward" and "super().forward(" in ast.unparse(node) for node in forwards)
    return wrapped and not aliases


@dataclass(frozen=True)
class Host:
    """What a plugin knows about its host.

    Args:
        name: as messages say it.
        package: its Python package, and its distribution.
        facts: what the plugin relies on.
        layers: its layer classes.
    """

    name: str
    package: str
    facts: tuple[HostFact, ...]
    layers: HostLayers
