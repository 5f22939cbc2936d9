"""The decisions of two policies in the same model: the sites where they differ, and policies between the two."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ops import OPERATORS

Branches = tuple[tuple[tuple[tuple[str, Any], ...], tuple[str, ...]], ...]
"""Condition (items, empty for none) and ids of the candidates, best first; the last one has no condition."""


@dataclass(frozen=True)
class Site:
    """A place where an operator is called.

    Args:
        op: the operator.
        scope: the layer's prefix; ``None`` for calls by name.
        also: further prefixes of the same module; a rule must name all.
    """

    op: str
    scope: str | None = None
    also: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of rules for this site alone."""
        return (self.op,) if self.scope is None else tuple(f"{self.op}@{name}" for name in (self.scope, *self.also))

    def __str__(self) -> str:
        shared = f" (a module of {len(self.also) + 1} layers)" if self.also else ""
        return (self.scope or f"{self.op} called by name") + shared


def in_order(site: Site) -> tuple[Any, ...]:
    """Return a key that sorts sites by operator and then in the order of layers: 2 before 10."""
    parts = re.split(r"(\d+)", site.scope or "")
    return site.op, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


@dataclass(frozen=True)
class Choices:
    """The choices in force in an engine.

    Args:
        at: site → implementations that may run there.
        ran: operator → ids of implementations that ran, if calls were counted; ``None`` if compiled code hides calls.
        failed: operator → ids that raised, and were replaced by another one.
        aten: ``aten::mm.out`` → the function that runs in its place.
        aten_called: the replaced operators that were called; empty if no backend counts.
        aten_kept: operators that would be replaced, but that a list leaves to PyTorch.
    """

    at: Mapping[Site, Branches]
    ran: Mapping[str, frozenset[str]] | None = None
    failed: Mapping[str, Sequence[str]] | None = None
    aten: Mapping[str, str] = field(default_factory=dict)
    aten_called: frozenset[str] = frozenset()
    aten_kept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Choices:
        """Parse the answer of :func:`~fl_dispatch.evidence.bisect.inside.answer`."""
        at = {
            Site(one["op"], one["scope"], tuple(one["also"])): tuple(
                (tuple(sorted((key, _plain(value)) for key, value in (when or {}).items() if value is not None)), ids)
                for when, ids in ((when, tuple(ids)) for when, ids in one["branches"])
            )
            for one in data["sites"]
        }
        ran: dict[str, frozenset[str]] = {}
        for op, impl_id, _ in data["counts"]:
            ran[op] = ran.get(op, frozenset()) | {impl_id}
        aten = data.get("aten", {})
        called, kept = (frozenset(aten.get(key, ())) for key in ("called", "kept"))
        return cls(at, None if data["frozen"] else ran, data["failed"], aten.get("replaced", {}), called, kept)

    def choice(self, site: Site) -> Branches | None:
        """Return the candidates at a site; a site that this engine lacks has those of calls by name."""
        return self.at.get(site) or self.at.get(Site(site.op))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def differing(good: Choices, bad: Choices, called: Collection[str]) -> list[Site]:
    """Return the sites where two policies differ, in order, without operators that are never called.

    An operator that ran the same implementation in both is left out. Calls by name have no separate site if an operator
    has layers.

    Args:
        called: operators that an engine under the good policy called.
    """
    found, scoped = [], {site.op for site in bad.at if site.scope is not None}
    for site, branches in bad.at.items():
        if good.choice(site) == branches or (site.scope is None and site.op in scoped):
            continue
        if not (start_only(site.op) or site.op in called or site not in good.at or site.op in (bad.ran or ())):
            continue
        if bad.ran is not None and good.ran is not None and not start_only(site.op):
            ran = bad.ran.get(site.op, frozenset())
            if len(ran) == 1 and ran == good.ran.get(site.op):
                continue
        found.append(site)
    return sorted(found, key=in_order)


def replaced_in_one(good: Choices, bad: Choices) -> list[str] | None:
    """Return the called ATen operators that only the bad policy replaces; ``None`` if the good one replaces others.

    For an engine that died before it answered, these are the operators that it would replace.
    """
    if any(bad.aten.get(key) != run for key, run in good.aten.items()):
        return None
    return [
        key
        for key in dict.fromkeys((*bad.aten, *sorted(bad.aten_kept)))
        if key not in good.aten and (not bad.aten_called or key in bad.aten_called)
    ]


def start_only(op: str) -> bool:
    """Whether an operator is called only while an engine starts."""
    return op in OPERATORS and OPERATORS[op].selection


def without(branches: Branches, suspects: Iterable[str], instead: Branches) -> Branches:
    """Return a choice without some implementations, followed by the candidates of another choice."""
    gone = frozenset(suspects)
    behind = tuple(dict.fromkeys(impl_id for _, ids in reversed(instead) for impl_id in ids))
    kept = []
    for when, ids in branches:
        left = [impl_id for impl_id in ids if impl_id not in gone]
        kept.append((when, (*left, *(impl_id for impl_id in behind if impl_id not in {*left, *gone}))))
    return tuple(kept)


def renamed(branches: Branches, name: Callable[[str], str]) -> Branches:
    """Rename each implementation id in a choice."""
    return tuple((when, tuple(map(name, ids))) for when, ids in branches)
