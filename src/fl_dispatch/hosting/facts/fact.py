"""A plugin's names in its host, as rows of data, and a check of whether a version's source still has them.

A host may move any of them. An overriding method is never called once the host's name is gone, and replacing a missing
attribute has no effect; neither raises an error. So each plugin has a file of facts (:mod:`.yaml_file`), and
:func:`check` compares them with the installed host, or with a wheel that is not installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from .source import SourceTree

Verb = Literal["reads", "expects", "overrides", "hooks", "replaces", "adds"]


@dataclass(frozen=True)
class HostFact:
    """Names of one class or module of a host.

    Args:
        owner: ``module:Class``, or ``module``.
        names: attributes of the class, of its instances, or of the module; none if the fact is that the owner exists. A
            function that ours replaces has our parameters, in Python's notation: ``"apply(layer, x, bias=None)"``. The
            host may lack one with a default; ``*args`` and ``**kwargs`` take any that the host adds; names before ``/``
            do not matter, because the host passes these by position.
        verb: ``reads`` (calls and sets too), ``expects`` the host's own code to use, ``overrides`` in a subclass,
            ``hooks`` by the host's own hooks, ``replaces`` at run time, ``adds`` to a subclass if the host has none.
        used_by: our modules that rely on them, below the plugin's package.
        why: the purpose of the names, or the damage without them.
        since: the first known version with the names; empty for all.
        until: the first version without the names; empty if none is known.
    """

    owner: str
    names: tuple[str, ...]
    verb: Verb
    used_by: str
    why: str
    since: str = ""
    until: str = ""

    def concerns(self, version: str) -> bool:
        """Whether a version should have the names; an unknown newer one should unless ``until`` is set."""
        found = release(version)
        return (not self.since or release(self.since) <= found) and (not self.until or found < release(self.until))

    @cached_property
    def plain_names(self) -> tuple[str, ...]:
        """Return the names without parameters."""
        return tuple(name.partition("(")[0] for name in self.names)


@dataclass(frozen=True)
class Broken:
    """One name that differs from its fact.

    Args:
        fact, name: the fact, and the name.
        what: the host's actual state.
    """

    fact: HostFact
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.fact.owner} {self.what}, which {self.fact.used_by} {self.fact.verb}"


@dataclass
class Findings:
    """The result of :func:`check`.

    Args:
        broken: names that differ from their facts.
        held: facts that hold entirely.
        names: number of names that were checked.
        of_other_versions: facts that do not concern this version.
        elsewhere: facts about packages without installed source.
    """

    broken: list[Broken] = field(default_factory=list)
    held: list[HostFact] = field(default_factory=list)
    names: int = 0
    of_other_versions: list[HostFact] = field(default_factory=list)
    elsewhere: list[HostFact] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the findings as text for the log."""
        return "; ".join(map(str, self.broken)) or f"all {self.names} names that are relied on are there"


def check(facts: Iterable[HostFact], tree: SourceTree, version: str) -> Findings:
    """Compare facts with the source of a host of this version."""
    findings = Findings()
    for fact in facts:
        if not fact.concerns(version):
            findings.of_other_versions.append(fact)
        elif not tree.covers(fact.owner.partition(":")[0]):
            findings.elsewhere.append(fact)
        else:
            findings.names += len(fact.names)
            whats = {name: _difference(fact, name, tree) for name in fact.names or ("",)}
            broken = [Broken(fact, name, what) for name, what in whats.items() if what is not None]
            findings.broken += broken
            if not broken:
                findings.held.append(fact)
    return findings


def _difference(fact: HostFact, name: str, tree: SourceTree) -> str | None:
    """Return what a version has instead of a fact's name, in words; ``None`` if the fact holds."""
    module, _, owner = fact.owner.partition(":")
    if tree.module(module) is None:
        return "is gone: there is no such module"
    if owner and tree.class_at(fact.owner) is None:
        return "is gone: there is no such class"
    if not name:
        return None
    plain = name.partition("(")[0]
    found = tree.attribute(fact.owner, plain)
    if fact.verb == "adds":
        return None if found is None else f"has a {plain} of its own"
    if found is None:
        return f"has no {plain}"
    if plain == name or not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    theirs, ours = parameters(found, bound=bool(owner)), _written(name)
    why = mismatch(ours, theirs)
    return None if why is None else f"has {plain}({ast.unparse(theirs)}) {why}"


# -- parameters -------------------------------------------------------------------------------------------------------


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> ast.arguments:
    """Return the names of a function's parameters; without ``self`` if it is looked up on an instance."""
    arguments = ast.parse(f"lambda {_plain(function.args)}: 0", mode="eval").body
    assert isinstance(arguments, ast.Lambda)
    static = any(isinstance(node, ast.Name) and node.id == "staticmethod" for node in function.decorator_list)
    if bound and not static:
        (arguments.args.posonlyargs or arguments.args.args).pop(0)
    return arguments.args


def _plain(arguments: ast.arguments) -> str:
    """Return parameters without annotations, and with ``None`` for every default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parts = [arg.arg if place < required else f"{arg.arg}=None" for place, arg in enumerate(positional)]
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [arg.arg if default is None else f"{arg.arg}=None" for arg, default in defaults]
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
    return ", ".join(parts)


def _written(name: str) -> ast.arguments:
    (function,) = ast.parse(f"def {name}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def mismatch(ours: ast.arguments, theirs: ast.arguments) -> str | None:
    """Return why a function with our parameters cannot replace one with theirs, or ``None``."""
    mine = [*ours.posonlyargs, *ours.args]
    defaulted = {arg.arg for arg in mine[len(mine) - len(ours.defaults) :]}
    positional = [arg.arg for arg in (*theirs.posonlyargs, *theirs.args)]
    named = {arg.arg for arg in theirs.kwonlyargs}
    mine_named = {arg.arg for arg in ours.kwonlyargs}
    for place, (arg, their) in enumerate(zip(mine, positional, strict=False)):
        if arg.arg != their and place >= len(ours.posonlyargs):
            return f"with '{their}' where '{arg.arg}' was"
    needed = [arg.arg for arg in mine[len(positional) :] if arg.arg not in defaulted]
    needed += [a.arg for a, default in zip(ours.kwonlyargs, ours.kw_defaults, strict=True) if default is None]
    open_ended = theirs.vararg is not None or theirs.kwarg is not None
    if gone := [name for name in needed if name not in named | set(positional) and not open_ended]:
        return f"without {', '.join(gone)}"
    takes_rest = ours.vararg is not None or ours.kwarg is not None
    known = {arg.arg for arg in mine} | mine_named
    extra = [name for name in (*positional[len(mine) :], *sorted(named)) if name not in known]
    return f"with {', '.join(extra)} as well" if extra and not takes_rest else None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: ``(0, 33, 0)`` for ``"0.33.0rc1"``."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"'{version}' is no version")
    return tuple(map(int, found.group().split(".")))
