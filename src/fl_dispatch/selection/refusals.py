"""Reasons why an implementation may not run whatever its order: vendors, lists, facts, availability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..settings.selection_policy import SelectionPolicy
from ..types import BackendImplKind, OpImpl

FLAGGEMS_ID = "default.flagos"


def why_excluded(
    op_name: str,
    impl: OpImpl,
    impls: Iterable[OpImpl],
    policy: SelectionPolicy,
    available: Callable[[OpImpl], tuple[bool, str]],
    facts: Mapping[str, Any],
) -> str:
    """Return why an implementation may not run at all; empty if it may."""
    kind = impl.kind
    has_reference = any(other.kind is BackendImplKind.REFERENCE for other in impls)
    if not policy.enabled and has_reference and kind is not BackendImplKind.REFERENCE:
        return f"dispatch is switched off, only the reference runs ({policy.origin('enabled')})"
    if kind is BackendImplKind.VENDOR and impl.vendor is not None and not policy.is_vendor_allowed(impl.vendor):
        if policy.denies_vendor(impl.vendor):
            return f"vendor {impl.vendor} is denied ({policy.origin('deny_vendors')})"
        return f"vendor {impl.vendor} is not among the allowed ones ({policy.origin('allow_vendors')})"
    if impl.impl_id == FLAGGEMS_ID and not policy.is_flaggems_allowed(op_name):
        listed = "flagos_blacklist" if policy.flagos_whitelist is None else "flagos_whitelist"
        return f"FlagGems is switched off for it ({policy.origin(listed if policy.use_flaggems else 'use_flaggems')})"
    if policy.batch_invariant and not impl.traits.batch_invariant:
        return f"it does not declare batch_invariant ({policy.origin('batch_invariant')})"
    if not policy.batch_invariant and impl.traits.only_batch_invariant:
        return f"it runs only with VLLM_BATCH_INVARIANT=1, which is off ({policy.origin('batch_invariant')})"
    for name, needed in impl.requires.items():
        if name in facts and not _holds(facts[name], needed):
            return f"it needs {name}={needed!r}, but here it is {_in_words(facts[name])}"
    is_available, why_not = available(impl)
    return "" if is_available else why_not


def _holds(fact: Any, needed: Any) -> bool:
    """Whether a fact meets a requirement; every member of a set counts as a fact."""
    return needed in fact if isinstance(fact, frozenset) else bool(fact == needed)


def _in_words(fact: Any) -> str:
    if not isinstance(fact, frozenset):
        return repr(fact)
    return " or ".join(sorted(map(repr, fact), key=lambda text: (len(text), text)))  # members may have different types
