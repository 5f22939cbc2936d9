"""The selection policy: which implementations may run, and in what order."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fl_dispatch.types import BackendImplKind

from . import codec
from .codec import Names, Origins
from .origins import CODE, Origin

PREFER_DEFAULT = BackendImplKind.DEFAULT.value
PREFER_VENDOR = BackendImplKind.VENDOR.value
PREFER_REFERENCE = BackendImplKind.REFERENCE.value
PREFERENCES = (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE)
VALID_PREFER_VALUES = frozenset(PREFERENCES)

_DEFAULT_ORDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        PREFER_DEFAULT: (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE),
        PREFER_VENDOR: (PREFER_VENDOR, PREFER_DEFAULT, PREFER_REFERENCE),
        PREFER_REFERENCE: (PREFER_REFERENCE, PREFER_DEFAULT, PREFER_VENDOR),
    }
)


@dataclass(frozen=True, kw_only=True)
class TunedRule:
    """An order of tokens for calls that meet the conditions; ``None`` is always met.

    Args:
        order: tokens, tried first to last.
        dtype: name of the leading tensor's dtype, such as ``bfloat16``.
        tokens: smallest and largest number of tokens, inclusive; a largest of ``None`` has no bound.
        phase: ``prefill`` or ``decode``.
    """

    order: tuple[str, ...]
    dtype: str | None = None
    tokens: tuple[int, int | None] | None = None
    phase: str | None = None

    def admits(self, tokens: int) -> bool:
        """Whether some calls of ``tokens`` tokens meet the conditions."""
        least, most = self.tokens or (0, None)
        return least <= tokens and (most is None or tokens <= most)

    @property
    def asks_for_tokens_alone(self) -> bool:
        """Whether the number of tokens alone decides if a call meets the conditions."""
        return self.dtype is None and self.phase is None


@dataclass(frozen=True)
class SelectionPolicy:
    """The implementations that may run, and their order. A value: frozen, hashable, comparable.

    Args:
        prefer: the kind to try first; it orders, it never excludes.
        strict: an implementation's error is raised unchanged instead of trying the next one.
        per_op_order: ``(operator, tokens)`` pairs; only the implementations that a token names are tried. The operator
            may carry a scope pattern: ``rms_norm@model.layers.3.*``.
        deny_vendors: vendors that never run; beats ``allow_vendors`` and ``impl:`` tokens.
        allow_vendors: the only vendors that may run; ``None`` allows all, an empty set none.
        op_tuned: ``(operator, rules)`` pairs: orders that depend on dtype, tokens and phase of a call. Below
            ``per_op_order``.
        enabled: whether dispatch is on; if off, an operator with a reference runs it.
        use_flaggems: whether FlagGems' implementations may run.
        flagos_whitelist: the only operators for which FlagGems may run; ``None`` for all.
        flagos_blacklist: operators for which FlagGems must not run.
        batch_invariant: only implementations that declare ``batch_invariant`` may run.
        origins: the origin of each field, for explanations; not part of the value.

    Raises:
        ValueError: a field has an invalid value.
    """

    prefer: str = PREFER_DEFAULT
    strict: bool = False
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deny_vendors: Names = frozenset()
    allow_vendors: Names | None = None
    op_tuned: tuple[tuple[str, tuple[TunedRule, ...]], ...] = ()
    enabled: bool = True
    use_flaggems: bool = True
    flagos_whitelist: Names | None = None
    flagos_blacklist: Names = frozenset()
    batch_invariant: bool = False
    origins: Origins = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prefer, str) or self.prefer not in VALID_PREFER_VALUES:
            raise ValueError(
                f"Invalid prefer value: {self.prefer!r}; valid are {', '.join(sorted(VALID_PREFER_VALUES))}"
            )
        for name in ("deny_vendors", "allow_vendors", "flagos_whitelist", "flagos_blacklist"):
            names = getattr(self, name)
            if isinstance(names, str):
                raise ValueError(f"{name} is a set of names, not the string {names!r}")
            object.__setattr__(self, name, None if names is None else frozenset(names))
        for name in ("per_op_order", "op_tuned"):
            pairs = getattr(self, name)
            if isinstance(pairs, Mapping):
                raise ValueError(f"{name} is a tuple of pairs; SelectionPolicy.from_dict takes a mapping")
            pairs = tuple((op, order if isinstance(order, str) else tuple(order)) for op, order in pairs)
            kind, called = (str, "tokens") if name == "per_op_order" else (TunedRule, "TunedRule")
            for op, order in pairs:
                if isinstance(order, str) or not all(isinstance(one, kind) for one in order):
                    raise ValueError(f"{name} of '{op}' is a sequence of {called}, not {order!r}")
            object.__setattr__(self, name, pairs)
            if len({op for op, _ in pairs}) != len(pairs):
                raise ValueError(f"{name} names an operator twice: {[op for op, _ in pairs]}")
        for op, order in self.per_op_order:
            if not order:
                raise ValueError(f"per_op_order of '{op}' is empty, so nothing could run")
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))

    def __reduce__(self) -> tuple[Any, ...]:
        return SelectionPolicy.from_json, (self.to_json(),)  # its origins are a view, which pickle refuses

    @classmethod
    def from_dict(
        cls,
        prefer: str = PREFER_DEFAULT,
        strict: bool = False,
        per_op_order: Mapping[str, Iterable[str]] | None = None,
        deny_vendors: Iterable[str] | None = None,
        allow_vendors: Iterable[str] | None = None,
    ) -> SelectionPolicy:
        """Make a policy from ordinary containers."""
        return cls(
            prefer=prefer,
            strict=strict,
            per_op_order=tuple((per_op_order or {}).items()),  # type: ignore[arg-type]  # made tuples, and checked
            deny_vendors=deny_vendors or frozenset(),  # type: ignore[arg-type]  # made a frozenset, and checked
            allow_vendors=allow_vendors,  # type: ignore[arg-type]
        )

    @property
    def per_op_order_dict(self) -> dict[str, list[str]]:
        """Return the per-operator orders as a dictionary."""
        return {op: list(order) for op, order in self.per_op_order}

    def get_default_order(self) -> list[str]:
        """Return the tokens in the order that ``prefer`` gives them."""
        return list(_DEFAULT_ORDERS[self.prefer])

    def get_per_op_order(self, op_name: str, scope: str | None = None) -> list[str] | None:
        """Return the tokens of an operator's own order, or ``None``."""
        key = self.per_op_key(op_name, scope)
        return None if key is None else list(dict(self.per_op_order)[key])

    def per_op_key(self, op_name: str, scope: str | None = None) -> str | None:
        """Return the key of the order that applies: an exact scope, else the longest pattern, else no scope."""
        return _most_specific((key for key, _ in self.per_op_order), op_name, scope)

    def get_tuned_rules(self, op_name: str, scope: str | None = None) -> tuple[TunedRule, ...]:
        """Return the operator's conditional orders, first match first; scopes apply as in :meth:`per_op_key`."""
        key = self.tuned_key(op_name, scope)
        return () if key is None else dict(self.op_tuned)[key]

    def tuned_key(self, op_name: str, scope: str | None = None) -> str | None:
        """Return the key of the conditional orders that apply, by the rules of :meth:`per_op_key`."""
        return _most_specific((key for key, _ in self.op_tuned), op_name, scope)

    def singles_out(self, op_name: str, scope: str | None) -> bool:
        """Whether a rule for some layers of an operator applies to this one."""
        keys = self.per_op_key(op_name, scope), self.tuned_key(op_name, scope)
        return any(key is not None and "@" in key for key in keys)

    def scopes_of(self, op_name: str) -> set[str]:
        """Return the layers, or patterns of layers, that an operator's rules name."""
        keys = (key.partition("@") for key, _ in (*self.per_op_order, *self.op_tuned))
        return {scope for op, _, scope in keys if op == op_name and scope}

    def is_vendor_allowed(self, vendor: str) -> bool:
        """Whether a vendor's implementations may run, ignoring the case of its name."""
        return not self.denies_vendor(vendor) and (self.allow_vendors is None or _names(vendor, self.allow_vendors))

    def denies_vendor(self, vendor: str) -> bool:
        """Whether a vendor is on the deny list."""
        return _names(vendor, self.deny_vendors)

    def is_flaggems_allowed(self, op_name: str) -> bool:
        """Whether FlagGems may run an operator; if there is a white-list, the blacklist has no effect."""
        if not self.use_flaggems:
            return False
        return (
            op_name in self.flagos_whitelist
            if self.flagos_whitelist is not None
            else op_name not in self.flagos_blacklist
        )

    def origin(self, field_name: str) -> Origin:
        """Return the origin of a field; ``per_op_order.rms_norm`` for the order of one key."""
        return self.origins.get(field_name) or self.origins.get(field_name.partition(".")[0], CODE)

    def fingerprint(self) -> str:
        """Return a short hash of the value, the same in every process."""
        plain = codec.to_plain(self)
        del plain["origins"]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the policy as text; :meth:`from_json` gives an equal one, origins included."""
        return codec.to_text(self)

    @classmethod
    def from_json(cls, text: str) -> SelectionPolicy:
        """Read the policy that :meth:`to_json` wrote.

        Raises:
            ValueError: the text was not written by :meth:`to_json` of this version.
        """
        return codec.from_text(cls, text)


def _most_specific(keys: Iterable[str], op_name: str, scope: str | None) -> str | None:
    weights = {}
    for key in keys:
        op, _, pattern = key.partition("@")
        if op == op_name and (not pattern or (scope and fits_scope(pattern, scope))):
            weights[key] = (pattern == scope, len(pattern))
    return max(weights, key=weights.__getitem__) if weights else None


def fits_scope(pattern: str, scope: str) -> bool:
    """Whether a pattern names a layer: it equals the layer's name, or is a glob that fits it."""
    return pattern == scope or fnmatch.fnmatchcase(scope, pattern)


def _names(vendor: str, vendors: Iterable[str]) -> bool:
    return vendor.casefold() in {name.casefold() for name in vendors}
