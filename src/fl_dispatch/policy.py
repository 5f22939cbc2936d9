"""What is wanted: the selection policy, globally and in contexts.

A context belongs to its thread or task. What the context variable holds is the dispatch *table* of the context's policy
(see :mod:`fl_dispatch.table`), so that a call reads one attribute and no policy.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from .errors import ConfigError
from .settings import Origin, Settings, TunedRule, get_settings, load_config_file, reset_settings
from .table import ROOT, DispatchTable, scope_variable

PREFER_DEFAULT = "flagos"
PREFER_VENDOR = "vendor"
PREFER_REFERENCE = "reference"
VALID_PREFER_VALUES = frozenset({PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE})

_DEFAULT_ORDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        PREFER_DEFAULT: ("flagos", "vendor", "reference"),
        PREFER_VENDOR: ("vendor", "flagos", "reference"),
        PREFER_REFERENCE: ("reference", "flagos", "vendor"),
    }
)
_CODE = Origin("code")


@dataclass(frozen=True)
class SelectionPolicy:
    """Which implementations may run, and in what order they are tried. A value: frozen, hashable, comparable.

    Args:
        prefer: the kind that is tried first. It orders, it never excludes.
        strict: an implementation's error is raised unchanged instead of trying the next one.
        per_op_order: ``(operator, tokens)`` pairs; only the implementations that a token names are tried. The operator may carry
            a scope pattern: ``rms_norm@model.layers.3.*``.
        deny_vendors: vendors that never run; beats ``allow_vendors`` and ``impl:`` tokens.
        allow_vendors: the only vendors that may run; ``None`` allows all, an empty set nobody.
        op_tuned: ``(operator, rules)`` pairs: orders that depend on dtype, tokens and phase of a call. Below ``per_op_order``.
        reference_only: dispatch is switched off; an operator that has a reference runs it.
        use_flaggems: whether FlagGems' implementations may run.
        flaggems_allow: the only operators for which FlagGems may run; ``None`` for all.
        flaggems_deny: operators for which FlagGems must not run.
        batch_invariant: only implementations that declare ``batch_invariant`` may run.
        origins: where each field was set, for explanations; not part of the value.

    Raises:
        ValueError: a field has a value that it cannot have.
    """

    prefer: str = PREFER_DEFAULT
    strict: bool = False
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None
    op_tuned: tuple[tuple[str, tuple[TunedRule, ...]], ...] = ()
    reference_only: bool = False
    use_flaggems: bool = True
    flaggems_allow: frozenset[str] | None = None
    flaggems_deny: frozenset[str] = frozenset()
    batch_invariant: bool = False
    origins: Mapping[str, Origin] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.prefer not in VALID_PREFER_VALUES:
            raise ValueError(f"Invalid prefer value: {self.prefer!r}; valid are {', '.join(sorted(VALID_PREFER_VALUES))}")
        for name in ("per_op_order", "op_tuned"):
            pairs = getattr(self, name)
            if isinstance(pairs, Mapping):
                raise ValueError(f"{name} is a tuple of pairs; SelectionPolicy.from_dict takes a mapping")
            object.__setattr__(self, name, tuple((op, tuple(order)) for op, order in pairs))
            if len({op for op, _ in pairs}) != len(self.__getattribute__(name)):
                raise ValueError(f"{name} names an operator twice: {[op for op, _ in pairs]}")
        for op, order in self.per_op_order:
            if not order:
                raise ValueError(f"per_op_order of '{op}' is empty, so nothing could run")

    @classmethod
    def from_dict(
        cls,
        prefer: str = PREFER_DEFAULT,
        strict: bool = False,
        per_op_order: Mapping[str, Iterable[str]] | None = None,
        deny_vendors: Iterable[str] | None = None,
        allow_vendors: Iterable[str] | None = None,
    ) -> SelectionPolicy:
        """A policy from ordinary containers."""
        return cls(
            prefer=prefer,
            strict=strict,
            per_op_order=tuple((op, tuple(order)) for op, order in (per_op_order or {}).items()),
            deny_vendors=frozenset(deny_vendors or ()),
            allow_vendors=None if allow_vendors is None else frozenset(allow_vendors),
        )

    @property
    def per_op_order_dict(self) -> dict[str, list[str]]:
        """The per-operator orders as a dictionary."""
        return {op: list(order) for op, order in self.per_op_order}

    def get_default_order(self) -> list[str]:
        """The tokens in the order that ``prefer`` gives them."""
        return list(_DEFAULT_ORDERS[self.prefer])

    def get_per_op_order(self, op_name: str, scope: str | None = None) -> list[str] | None:
        """The tokens of an operator's own order, or ``None``. An exact scope beats a longer pattern beats a shorter one."""
        best: tuple[int, int, tuple[str, ...]] | None = None
        for key, order in self.per_op_order:
            op, _, pattern = key.partition("@")
            if op != op_name or (pattern and not (scope and fnmatch.fnmatchcase(scope, pattern))):
                continue
            weight = (int(pattern == scope), len(pattern), order)
            best = weight if best is None or weight[:2] > best[:2] else best
        return None if best is None else list(best[2])

    def get_tuned_rules(self, op_name: str) -> tuple[TunedRule, ...]:
        """The operator's conditional orders, first match first."""
        return next((rules for op, rules in self.op_tuned if op == op_name), ())

    def is_vendor_allowed(self, vendor: str) -> bool:
        """Whether a vendor's implementations may run. Vendor names are compared without regard to case."""
        return not self.denies_vendor(vendor) and (self.allow_vendors is None or _names(vendor, self.allow_vendors))

    def denies_vendor(self, vendor: str) -> bool:
        """Whether a vendor is on the deny list."""
        return _names(vendor, self.deny_vendors)

    def is_flaggems_allowed(self, op_name: str) -> bool:
        """Whether FlagGems may run an operator; a white-list leaves no say to the blacklist."""
        if not self.use_flaggems:
            return False
        return op_name in self.flaggems_allow if self.flaggems_allow is not None else op_name not in self.flaggems_deny

    def origin(self, field_name: str) -> Origin:
        """Where a field was set."""
        return self.origins.get(field_name, _CODE)

    def fingerprint(self) -> str:
        """A short hash of the value, the same in every process."""
        return hashlib.sha256(json.dumps(self._plain(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The policy as text; :meth:`from_json` gives an equal one, origins included."""
        return json.dumps({**self._plain(), "origins": {name: str(origin) for name, origin in self.origins.items()}})

    @classmethod
    def from_json(cls, text: str) -> SelectionPolicy:
        """The policy that :meth:`to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        for name in ("deny_vendors", "allow_vendors", "flaggems_allow", "flaggems_deny"):
            data[name] = None if data[name] is None else frozenset(data[name])
        data["per_op_order"] = tuple((op, tuple(order)) for op, order in data["per_op_order"])
        data["op_tuned"] = tuple((op, tuple(_rule(rule) for rule in rules)) for op, rules in data["op_tuned"])
        data["origins"] = MappingProxyType({name: Origin(text) for name, text in data["origins"].items()})
        return cls(**data)

    def _plain(self) -> dict[str, Any]:
        return {
            "prefer": self.prefer,
            "strict": self.strict,
            "per_op_order": [[op, list(order)] for op, order in self.per_op_order],
            "deny_vendors": sorted(self.deny_vendors),
            "allow_vendors": None if self.allow_vendors is None else sorted(self.allow_vendors),
            "op_tuned": [
                [op, [[list(r.order), r.dtype, list(r.tokens) if r.tokens else None, r.phase] for r in rules]]
                for op, rules in self.op_tuned
            ],
            "reference_only": self.reference_only,
            "use_flaggems": self.use_flaggems,
            "flaggems_allow": None if self.flaggems_allow is None else sorted(self.flaggems_allow),
            "flaggems_deny": sorted(self.flaggems_deny),
            "batch_invariant": self.batch_invariant,
        }


def _names(vendor: str, vendors: Iterable[str]) -> bool:
    return vendor.casefold() in {name.casefold() for name in vendors}


def _rule(plain: list[Any]) -> TunedRule:
    order, dtype, tokens, phase = plain
    return TunedRule(order=tuple(order), dtype=dtype, tokens=tuple(tokens) if tokens else None, phase=phase)


def policy_from_settings(settings: Settings) -> SelectionPolicy:
    """The policy that the user's settings ask for."""
    renamed = {
        "reference_only": "enabled",
        "flaggems_allow": "flagos_whitelist",
        "flaggems_deny": "flagos_blacklist",
    }
    names = [name for name in SelectionPolicy.__dataclass_fields__ if name != "origins"]
    values = {name: getattr(settings, renamed.get(name, name)) for name in names}
    values["reference_only"] = not settings.enabled
    origins = MappingProxyType({name: settings.origin(renamed.get(name, name)) for name in names})
    return SelectionPolicy(**values, origins=origins)


def policy_from_config(config_path: str | os.PathLike[str]) -> SelectionPolicy:
    """The policy that a YAML config file describes; items that it lacks have their built-in default.

    Raises:
        ConfigError: the file is missing (then also a ``FileNotFoundError``), unreadable or wrong.
    """
    return policy_from_settings(load_config_file(config_path))


class PolicyManager:
    """Owner of the global policy and of the tables that policy contexts use. One a process."""

    _instance: PolicyManager | None = None
    KEPT_TABLES = 64  # policies whose tables are kept for the next context with the same policy

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._global: SelectionPolicy | None = None
        self._epoch = 0
        self._from_settings = True
        self._scoped: dict[SelectionPolicy, DispatchTable] = {}
        self._live: weakref.WeakSet[DispatchTable] = weakref.WeakSet()
        self.on_change: Callable[[], None] = lambda: None
        self.on_table: Callable[[DispatchTable], None] = lambda table: None

    @classmethod
    def get_instance(cls) -> PolicyManager:
        """The process's policy manager."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def get_policy(self) -> SelectionPolicy:
        """The policy in force here: the innermost context's, else the global one."""
        table = scope_variable.get(None)
        return self.get_global_policy() if table is None else table.policy

    def get_global_policy(self) -> SelectionPolicy:
        """The global policy; read from the settings when nobody set one.

        Raises:
            ConfigError: the settings are wrong.
        """
        policy = self._global
        if policy is None:
            policy = self._global = policy_from_settings(get_settings())
        return policy

    def set_global_policy(self, policy: SelectionPolicy) -> SelectionPolicy:
        """Replace the global policy; returns the one before."""
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"a SelectionPolicy is needed, not {type(policy).__name__}")
        with self._lock:
            before = self.get_global_policy()
            self._global = policy
            self._from_settings = False
            self._epoch += 1
        self.on_change()
        return before

    def reread_settings(self) -> None:
        """Read the settings again; a global policy that was set in code stays."""
        with self._lock:
            reset_settings()
            if self._from_settings:
                self._global = None
                self._epoch += 1

    def reset_global_policy(self) -> None:
        """Read the settings again and let them decide."""
        with self._lock:
            reset_settings()
            self._global = None
            self._from_settings = True
            self._epoch += 1
        self.on_change()

    def get_policy_epoch(self) -> int:
        """A number that grows with every change of the global policy."""
        return self._epoch

    def table_for(self, policy: SelectionPolicy) -> DispatchTable:
        """The default manager's table for a context with this policy."""
        with self._lock:
            table = self._scoped.pop(policy, None)
            if table is None:
                table = DispatchTable(policy)
                self._live.add(table)
                self.on_table(table)
            self._scoped[policy] = table  # last: most recently used
            while len(self._scoped) > self.KEPT_TABLES:
                del self._scoped[next(iter(self._scoped))]
        return table

    def tables(self) -> list[DispatchTable]:
        """The tables that contexts use or may use again."""
        return list(self._live)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()


def get_policy() -> SelectionPolicy:
    """The policy in force here: the innermost context's, else the global one."""
    return PolicyManager.get_instance().get_policy()


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Replace the global policy; returns the one before. Lifts bans of failed implementations."""
    return PolicyManager.get_instance().set_global_policy(policy)


def reset_global_policy() -> None:
    """Read the settings again (config file, environment, platform file) and let them decide."""
    PolicyManager.get_instance().reset_global_policy()


def get_policy_epoch() -> int:
    """A number that grows with every change of the global policy."""
    return PolicyManager.get_instance().get_policy_epoch()


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Use a policy inside the ``with`` block, in this thread or task only."""
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"a SelectionPolicy is needed, not {type(policy).__name__}")
    ROOT.scope()
    token = scope_variable.set(PolicyManager.get_instance().table_for(policy))
    try:
        yield policy
    finally:
        scope_variable.reset(token)


def _changed(**changes: Any) -> SelectionPolicy:
    policy = get_policy()
    origins = {**policy.origins, **dict.fromkeys(changes, _CODE)}
    return replace(policy, **changes, origins=MappingProxyType(origins))


@contextmanager
def with_strict_mode(strict: bool = True) -> Iterator[SelectionPolicy]:
    """Raise an implementation's error unchanged inside the ``with`` block."""
    with policy_context(_changed(strict=strict)) as policy:
        yield policy


@contextmanager
def with_preference(prefer: str) -> Iterator[SelectionPolicy]:
    """Try another kind first inside the ``with`` block.

    Raises:
        ValueError: ``prefer`` is not one of ``VALID_PREFER_VALUES``.
    """
    with policy_context(_changed(prefer=prefer)) as policy:
        yield policy


@contextmanager
def with_allowed_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Allow only these vendors inside the ``with`` block (replacing the list in force); without any, nobody."""
    with policy_context(_changed(allow_vendors=frozenset(vendors))) as policy:
        yield policy


@contextmanager
def with_denied_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Deny these vendors too inside the ``with`` block (adding to the list in force)."""
    with policy_context(_changed(deny_vendors=get_policy().deny_vendors | set(vendors))) as policy:
        yield policy


__all__ = [
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "VALID_PREFER_VALUES",
    "ConfigError",
    "PolicyManager",
    "SelectionPolicy",
    "get_policy",
    "get_policy_epoch",
    "policy_context",
    "policy_from_config",
    "policy_from_settings",
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
