"""A plugin's facts about its host: ``host_facts.yaml`` in the plugin's package, and the overrides of its classes.

The file has a section for each class (``module:Class``) or module of the host, in alphabetical order::

    vllm.v1.worker.gpu_worker:Worker:
    - since: 0.32                              # optional, first: of the section, derived facts too
    - reads: get_draft_model(), model_runner   # a verb and names, with parameters if ours replaces a function
      why: The model that drafts; its layers are ours too.
      until: 0.34                              # the first version without them

``overrides`` lists the names that :mod:`.overrides` cannot derive: private names, methods of mixins, reasons and
versions. A name without parameters gets those of our method. ``adds`` lists public names of our class that the host's
must not have. ``expects`` lists names that we rely on though only the host's own code uses them. A fact without names
says that the module or class exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import yaml

from .fact import HostFact, Verb
from .overrides import Overrides, overrides

NAME = "host_facts.yaml"
_VERSION = re.compile(r"\d+(\.\d+)*")
_COMMA = re.compile(r",\s*(?![^(]*\))")
"""A comma that separates names, not parameters."""


class _Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
    """YAML loader that refuses a key that stands twice, because YAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"{twice}: stands twice, at line {node.start_mark.line + 1} and below")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


@dataclass(frozen=True)
class Section:
    """One class or module of a host, as a file describes it.

    Args:
        owner: ``module:Class``, or ``module``.
        facts: the written facts, without our modules.
        since, until: the versions of the whole section.
    """

    owner: str
    facts: tuple[HostFact, ...]
    since: str = ""
    until: str = ""


def folder_of(plugin: str) -> Path:
    """Return the folder of a plugin's package without importing it."""
    spec = find_spec(plugin)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def written(plugin: str) -> tuple[Section, ...]:
    """Return the sections of a plugin's file.

    Raises:
        ValueError: see :func:`parse`; the message names the file.
    """
    file = folder_of(plugin) / NAME
    try:
        return parse(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def parse(text: str) -> tuple[Section, ...]:
    """Return the sections of a file's text.

    Raises:
        ValueError: an entry does not have exactly one verb, or has an unknown key or lacks a version where one is
            needed.
    """
    return tuple(_section(owner, entries) for owner, entries in yaml.load(text, _Loader).items())


def _section(owner: str, entries: list[dict[str, str]]) -> Section:
    """Return the facts of one owner; a first entry of versions alone holds for all others."""
    own = entries[0] if not entries[0].keys() - {"since", "until"} else {}
    facts = []
    for entry, key in ((entry, key) for entry in entries for key in ("since", "until") if key in entry):
        if not isinstance(entry[key], str) or not _VERSION.fullmatch(entry[key]):
            raise ValueError(f"{owner}: '{key}: {entry[key]}' is no version such as 0.32 or 0.5.23")
    for entry in entries[1:] if own else entries:
        rest = {**own, **entry}
        verbs = [verb for verb in get_args(Verb) if verb in rest]
        names = tuple(filter(None, _COMMA.split(rest.pop(verbs[0])))) if len(verbs) == 1 else ()
        if len(verbs) != 1 or rest.keys() - {"why", "since", "until"}:
            raise ValueError(f"{owner}: an entry has one of {', '.join(get_args(Verb))}, why, since and until: {entry}")
        facts.append(HostFact(owner, names, verbs[0], "", **{"why": "", **rest}))
    return Section(owner, tuple(facts), **own)


def facts(plugin: str, host: str, implied: Iterable[HostFact] = ()) -> tuple[HostFact, ...]:
    """Return all facts of a plugin, each with the plugin's modules that use it.

    Args:
        plugin, host: their packages.
        implied: facts that follow from the plugin's own tables.
    """
    folder, sections = folder_of(plugin), {section.owner: section for section in written(plugin)}
    ours = list(overrides(plugin, folder, host))
    methods = {(each.owner, name) for each in ours for name in each.names}
    rest = [part for section in sections.values() for fact in section.facts for part in _underived(fact, methods)]
    files = sorted(folder.rglob("*.py"))
    words = {_module(folder, file): set(re.findall(r"\w+", file.read_text(encoding="utf-8"))) for file in files}
    named = (
        replace(fact, used_by=plugin if fact.verb == "expects" else _in_words(users(fact, words))) for fact in rest
    )
    derived = (fact for each in ours for fact in _of_class(each, sections.get(each.owner, Section(each.owner, ()))))
    return (*named, *derived, *implied)


def _underived(fact: HostFact, methods: set[tuple[str, str]]) -> Iterator[HostFact]:
    """Yield a fact without the names that our class is known to override."""
    names = tuple(n for n in fact.names if fact.verb != "overrides" or (fact.owner, n.partition("(")[0]) not in methods)
    if names or not fact.names:
        yield replace(fact, names=names)


def _of_class(ours: Overrides, section: Section) -> Iterator[HostFact]:
    """Yield the facts about the overrides of one of our classes, with the section's versions and reasons."""
    added = {name for fact in section.facts if fact.verb == "adds" for name in fact.names}
    said = [(n, n.partition("(")[0], fact) for fact in section.facts if fact.verb == "overrides" for n in fact.names]
    every = HostFact(section.owner, (), "overrides", "", ours.why, section.since, section.until)
    found = [
        (ours.names[name], every) for name in ours.public if name not in added.union(plain for _, plain, _ in said)
    ]
    found += [(name if "(" in name else ours.names[name], fact) for name, plain, fact in said if plain in ours.names]
    for fact, group in groupby(found, key=lambda pair: pair[1]):
        yield replace(fact, names=tuple(name for name, _ in group), used_by=ours.user)


def users(fact: HostFact, words: dict[str, set[str]]) -> list[str]:
    """Return the plugin's modules that use a fact, judged by their words; none if one of its names is in no module.

    Modules with all of its names come before modules with some. If there are more than three, only those that name its
    owner count.

    Args:
        words: module of the plugin, below its package → the words of its text.
    """
    names, owner = set(fact.plain_names), re.split("[.:]", fact.owner)[-1]
    if names - set().union(*words.values()):
        return []
    found = [module for module, text in words.items() if names <= text]
    found = found or [module for module, text in words.items() if names & text]
    closer = [module for module in found if owner in words[module]] if len(found) > 3 else []
    return closer or found


def _in_words(modules: list[str]) -> str:
    first, others = modules[:3], len(modules) - 3
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")


def _module(folder: Path, file: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
