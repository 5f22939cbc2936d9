"""A host's layer classes: those that run our operators, could run them, or stay the host's for a reason."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .fact import HostFact
from .source import Class, SourceTree

State = Literal["replaced", "left", "pending", "unjudged"]


@dataclass(frozen=True)
class Judgement:
    """The judgement on one layer class of a host.

    Args:
        cls: the class.
        state: our forward runs; the host's runs on purpose; the host's runs until the work is done; not judged.
        why: the reason; empty for a class that is replaced, or not judged.
    """

    cls: Class
    state: State
    why: str = ""


@dataclass(frozen=True)
class HostLayers:
    """A plugin's statement about its host's layer classes.

    Args:
        roots: ``module:Class`` of the classes that the host's exchangeable layers derive from.
        replaced: ``module:Class`` of the classes with our forward.
        left: class or dotted module (for all classes below it) → why it stays the host's.
        inherited: whether a subclass without its own forward inherits its base's replacement; otherwise each class is
            replaced by its exact name.
        pending: as ``left``, for classes that could run our operator but do not yet: the operator, and the missing
            part.
    """

    roots: tuple[str, ...]
    replaced: frozenset[str]
    left: Mapping[str, str]
    inherited: bool
    pending: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the classes that a user's list may name."""
        return frozenset(
            {path.partition(":")[2] for path in self.replaced}
            | {n for n in (*self.left, *self.pending) if "." not in n}
        )

    def judge(self, tree: SourceTree, package: str) -> list[Judgement]:
        """Judge every layer class of a host, in the order of the source."""
        return [self._judgement(cls, tree) for cls in tree.subclasses(package, self.roots)]

    def _judgement(self, cls: Class, tree: SourceTree) -> Judgement:
        """Judge a class by the first base with a reason; bases count as far as a class only wraps them."""
        for base in tree.ancestors(cls) if self.inherited else [cls]:
            if base.path in self.replaced:
                return Judgement(cls, "replaced")
            if (why := _reason(base, self.pending)) is not None:
                return Judgement(cls, "pending", why)
            if (why := _reason(base, self.left)) is not None:
                return Judgement(cls, "left", why)
            if not _only_wraps(base):
                break
        return Judgement(cls, "unjudged")


def _reason(cls: Class, reasons: Mapping[str, str]) -> str | None:
    modules = (name for name in reasons if "." in name and f"{cls.module.name}.".startswith(f"{name}."))
    return reasons.get(cls.node.name) or next((reasons[name] for name in modules), None)


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
    """A plugin's knowledge of its host.

    Args:
        name: its name in messages.
        package: its Python package, and its distribution.
        facts: returns the names that the plugin relies on, from the plugin's source.
        layers: its layer classes.
        plugin: the plugin's package.
    """

    name: str
    package: str
    facts: Callable[[], tuple[HostFact, ...]]
    layers: HostLayers
    plugin: str
