"""Freezing: from here on nothing changes what runs, and the manifest says what that is.

Hosts that drop the guards of compiled code, or replay captured graphs, would go on with an old choice after a change.
So they freeze dispatch before they compile; a change that would alter a choice is an error from then on, and so is a
failure, because nothing may take over. A change that alters no choice passes.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from .aten_operators import replaced_operators
from .builder import takes_every_call, who_may_run
from .errors import DispatchFrozenError
from .failures import ArgumentKind
from .locking import writers
from .logger_manager import get_logger
from .policy import PolicyManager
from .selection import Decision, condition_of
from .types import OpImpl

if TYPE_CHECKING:
    from .op_manager import OpManager
    from .selection_policy import SelectionPolicy
    from .settings import TunedRule

logger = get_logger(__name__)


@dataclass(frozen=True)
class Choice:
    """What runs for the calls that a rule admits.

    Args:
        rule: the condition; ``None`` for all other calls.
        runs: the implementation that runs, after those that may decline some of these calls.
        banned: kinds of arguments for which an implementation of ``runs`` is left out, by its id.
        complete: the last of ``runs`` takes every call that reaches it.
    """

    rule: TunedRule | None
    runs: tuple[OpImpl, ...]
    banned: frozenset[tuple[str, ArgumentKind]] = frozenset()
    complete: bool = True

    @property
    def sole(self) -> bool:
        """Whether one implementation takes every call, whatever its arguments."""
        return self.rule is None and len(self.runs) == 1 and self.complete

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        data: dict[str, Any] = {"runs": [impl.impl_id for impl in self.runs]}
        if self.rule is not None:
            data["when"] = condition_of(self.rule)
        if self.banned:
            data["not for"] = sorted(f"{impl_id}: {kind}" for impl_id, kind in self.banned)
        return data


Choices = tuple[Choice, ...]


@dataclass(frozen=True)
class Manifest:
    """What runs in a process whose dispatch is frozen.

    Args:
        choices: operator → its choices as plain data, conditional ones first; and ``operator@scope`` for each layer
            that runs something else than the operator elsewhere.
        reasons: the same keys → why.
        versions: package → version: torch, this one, and those that the implementations come from.
        aten: operator of PyTorch → the function that replaces it, see :mod:`.aten_operators`.
        hash: of choices, versions and replaced operators; equal in processes that run the same.
    """

    choices: Mapping[str, list[dict[str, Any]]]
    reasons: Mapping[str, str]
    versions: Mapping[str, str]
    aten: Mapping[str, str] = field(default_factory=dict)
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        parts = {"choices": dict(self.choices), "versions": dict(self.versions), "aten": dict(self.aten)}
        text = json.dumps(parts, sort_keys=True)
        object.__setattr__(self, "choices", json.loads(text)["choices"])  # so that it equals one from another process
        object.__setattr__(self, "hash", hashlib.sha256(text.encode()).hexdigest()[:16])

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest.from_data, (self.as_data(),)  # its mappings are views, which pickle refuses

    def as_data(self) -> dict[str, Any]:
        """The manifest as plain data, for other processes and files."""
        return {
            "hash": self.hash,
            "choices": dict(self.choices),
            "reasons": dict(self.reasons),
            "versions": dict(self.versions),
            "aten": dict(self.aten),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest that :meth:`as_data` described.

        Raises:
            ValueError: the hash is not that of the choices and versions.
        """
        manifest = cls(data["choices"], data["reasons"], data["versions"], data["aten"])
        if data["hash"] != manifest.hash:
            raise ValueError(
                f"a manifest with the hash {data['hash']} was changed: its contents hash to {manifest.hash}"
            )
        return manifest

    def differences(self, other: Manifest) -> list[str]:
        """One line for each operator, layer and package that is not the same in both; empty if the hashes agree."""
        lines = []
        for mine, theirs in (
            (self.choices, other.choices),
            (self.versions, other.versions),
            (self.aten, other.aten),
        ):
            for key in sorted({*mine, *theirs}):
                one, two = mine.get(key), theirs.get(key)
                if one != two:
                    lines.append(f"{key}: {_short(one)} here, {_short(two)} there")
        return lines


_frozen: tuple[weakref.ref[Freezer], ...] = ()  # replaced as a whole


def frozen_ones() -> Iterator[Freezer]:
    """The freezers of the managers that are frozen."""
    for reference in _frozen:
        freezer = reference()
        if freezer is not None:
            yield freezer


class Freezer:
    """Freezes the choices of one manager and keeps them."""

    def __init__(self, manager: OpManager) -> None:
        self._manager = manager
        self._choices: dict[tuple[str, str | None], Choices] = {}
        self._admitted: dict[tuple[SelectionPolicy, bool], list[str]] = {}
        self.manifest: Manifest | None = None

    def freeze(self) -> Manifest:
        """Fix what runs now, for the global policy, every operator and every bound layer. Idempotent.

        A policy context that is open, in any thread, and asks for something else runs what is fixed from now on.
        """
        global _frozen
        manager = self._manager
        manager.ensure_initialized()
        with writers:
            if self.manifest is not None:
                return self.manifest
            decided = {(d.op_name, d.scope): d for d in manager.tables.root.decisions.values()}
            self._choices = {key: self._choices_of(decision) for key, decision in decided.items()}
            self._admitted = {}
            self.manifest = _manifest(decided, self._choices)
            _frozen = (*(weakref.ref(other) for other in frozen_ones()), weakref.ref(self))
            manager.republish(None)
        logger.info("Dispatch is frozen: manifest %s, %d operators", self.manifest.hash, len(self.manifest.choices))
        return self.manifest

    def thaw(self) -> None:
        """Allow changes again."""
        global _frozen
        with writers:
            if self.manifest is None:
                return
            _frozen = tuple(weakref.ref(other) for other in frozen_ones() if other is not self)
            self.manifest, self._choices, self._admitted = None, {}, {}
            self._manager.republish(None)
        logger.info("Dispatch is thawed")

    def fix(self, decision: Decision) -> Choices:
        """What is fixed for an operator or layer; one that came after the freeze, which the manifest does not list, is
        fixed now.
        """
        key = decision.op_name, decision.scope
        if key not in self._choices:
            self._choices[key] = self._choices_of(decision)
            self._admitted = {}  # what was admitted says nothing of this one
        return self._choices[key]

    def check(self, change: str, *, bans: bool = True, only: str | None = None) -> None:
        """Whether everything frozen would be decided the same after a change that is in place already.

        Args:
            change: what changed, for the message.
            bans: whether bans count.
            only: the one operator that it may concern; all by default.

        Raises:
            DispatchFrozenError: it would not, under the global policy or one that a context was admitted with.
        """
        if self.manifest is None:
            return
        admitted = [policy for (policy, _), found in self._admitted.items() if not found]
        in_use = [self._manager.tables.root.policy, *admitted]
        for policy in dict.fromkeys(in_use):
            different = self._differences(policy, bans, only)
            if different:
                raise DispatchFrozenError(change, different)
        self._admitted = {key: found for key, found in self._admitted.items() if not found}

    def admits(self, policy: SelectionPolicy, *, bans: bool = True) -> bool:
        """Whether a policy makes the choices that are fixed."""
        return self.manifest is None or not self._remembered(policy, bans)

    def admit(self, change: str, policy: SelectionPolicy, *, bans: bool) -> None:
        """The same; raises :class:`DispatchFrozenError` if it does not."""
        if not self.admits(policy, bans=bans):
            raise DispatchFrozenError(change, self._remembered(policy, bans))

    def _remembered(self, policy: SelectionPolicy, bans: bool) -> list[str]:
        found = self._admitted.get((policy, bans))
        if found is None:
            with writers:
                self._forget_ended()
                found = self._admitted[policy, bans] = self._differences(policy, bans)
        return found

    def _forget_ended(self) -> None:
        """Drop policies that no context uses or may soon use again; one that comes back is asked about again."""
        policies = PolicyManager.get_instance()
        if len(self._admitted) > 2 * policies.KEPT_TABLES:
            in_use = {table.policy for table in policies.tables()}
            self._admitted = {key: found for key, found in self._admitted.items() if key[0] in in_use}

    def _differences(self, policy: SelectionPolicy, bans: bool, only: str | None = None) -> list[str]:
        manager, different = self._manager, []
        for (op_name, scope), before in self._choices.items():
            if only not in (None, op_name):
                continue
            impls = manager.registry.get_implementations(op_name)
            now = self._choices_of(manager.decide(op_name, scope, policy, bans=bans), bans) if impls else ()
            if now != before:
                where = f"{op_name}@{scope}" if scope else op_name
                different.append(f"{where}: {_short(_data(before))} would become {_short(_data(now))}")
        return different

    def _choices_of(self, decision: Decision, bans: bool = True) -> Choices:
        manager, found = self._manager, []
        for branch in decision.branches:
            runs = who_may_run(manager, decision, branch, bans)
            kinds = {(impl.impl_id, kind) for impl in runs for kind in manager.failures.kinds(impl, decision.scope)}
            complete = bool(runs) and takes_every_call(manager, decision, runs[-1], bans)
            found.append(Choice(branch.rule, tuple(runs), frozenset(kinds if bans else ()), complete))
        return tuple(found)


def _manifest(
    decided: Mapping[tuple[str, str | None], Decision], choices: Mapping[tuple[str, str | None], Choices]
) -> Manifest:
    named: dict[str, list[dict[str, Any]]] = {}
    reasons: dict[str, str] = {}
    for (op_name, scope), made in sorted(choices.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        if scope and _data(made) == _data(choices.get((op_name, None), ())):
            continue
        key = f"{op_name}@{scope}" if scope else op_name
        decision = decided[op_name, scope]
        named[key] = _data(made)
        reasons[key] = decision.considered[0].reason if decision.chosen else "no implementation can run"
    impls = {impl for made in choices.values() for choice in made for impl in choice.runs}
    versions = MappingProxyType(_versions(impls))
    return Manifest(MappingProxyType(named), MappingProxyType(reasons), versions, replaced_operators())


def _versions(impls: set[OpImpl]) -> dict[str, str]:
    from . import __version__

    versions = {"fl_dispatch": __version__, "torch": str(torch.__version__)}
    distributions = metadata.packages_distributions()
    roots = {function.partition(".")[0] for function in replaced_operators().values()}
    for impl in impls:
        fn = inspect.unwrap(impl.fn)
        fn = fn.func if isinstance(fn, functools.partial) else fn
        roots.add(str(getattr(fn, "__module__", None) or type(fn).__module__).partition(".")[0])
    for root in roots:
        if root not in versions:
            names = sorted(set(distributions.get(root, ())))
            versions[root] = ", ".join(f"{name} {metadata.version(name)}" for name in names) or "unknown"
    return dict(sorted(versions.items()))


def _data(choices: Choices) -> list[dict[str, Any]]:
    return [choice.as_data() for choice in choices]


def _short(value: Any) -> str:
    """A manifest's entry in one line."""
    if not value:
        return "nothing"
    if isinstance(value, str):
        return value
    if len(value) == 1 and set(value[0]) == {"runs"}:
        return ", else ".join(value[0]["runs"]) or "nothing"
    return json.dumps(value, sort_keys=True)
