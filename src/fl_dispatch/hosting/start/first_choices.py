"""The implementations that come first in the policy's order, and what a host has to know of them before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from ... import get_default_manager, get_policy
from ...compiled.manifest import Manifest
from ...types import BackendImplKind, OpImpl

STATES = 2
"""The states that an implementation with a ``chunk`` keeps for each: one before it is added to them, one behind it."""


def states_kept(op_name: str, tokens: int) -> int:
    """The most states, besides those of requests, that first choices keep at once for a prompt of so many tokens."""
    chunks = (impl.traits.chunk for impl in get_default_manager().first_choices(op_name, in_layers=True))
    most: int = max((-(-tokens // chunk) * STATES for chunk in chunks if chunk), default=0)
    return most


def without_graphs(operators: Iterable[str], given: Iterable[str] = ()) -> list[OpImpl]:
    """The first choices for these operators, called with these optional parameters, that no graph can hold."""
    manager = get_default_manager()
    firsts = (impl for op in operators for impl in manager.first_choices(op, given=given))
    return [impl for impl in firsts if not impl.traits.graphs]


def has_kernel(op_name: str, given: Iterable[str] = ()) -> bool:
    """Whether the policy puts something before PyTorch's own, for some layer, under some condition at least.

    It is asked for calls with these optional parameters.
    """
    first = get_default_manager().first_choices(op_name, in_layers=True, given=given)
    return any(impl.kind is not BackendImplKind.REFERENCE or impl.traits.batch_invariant for impl in first)


def joins(joined: str, parts: Iterable[str], tokens: int | None = None) -> bool:
    """Whether calls of the parts, of so many tokens or any, may become calls of an operator that joins them.

    It has to be more than its reference, and the user to ask for no implementation of a part.
    """
    first = get_default_manager().first_choices(joined, tokens=tokens)
    better = bool(first) and all(impl.kind is not BackendImplKind.REFERENCE for impl in first)
    return better and not {key.partition("@")[0] for key, _ in get_policy().per_op_order} & {*parts}


def of_one_backend(joined: str, parts: Iterable[str], tokens: int | None = None) -> bool:
    """Whether a joined operator is computed by whoever computes its parts, or the user asks for one of its own.

    It is asked for calls of so many tokens, or for all.
    """
    if joined in {key.partition("@")[0] for key, _ in get_policy().per_op_order}:
        return True
    manager = get_default_manager()
    firsts = [impl for op in (joined, *parts) for impl in manager.first_choices(op, in_layers=True, tokens=tokens)]
    return len({impl.vendor or impl.impl_id for impl in firsts}) == 1


def boundary(op_name: str) -> int | None:
    """The number of tokens from which on the operator's first choices do what its reference does, if they all do."""
    return _last(map(_reference_from, get_default_manager().first_choices(op_name)))


def reference_from(manifest: Manifest, op_name: str, scope: str | None = None) -> int | None:
    """The number of tokens from which on frozen choices do what the reference does; ``None`` if there is none."""
    registry = get_default_manager().registry
    begins = []
    for choice in manifest.choices.get(f"{op_name}@{scope}" if scope else op_name) or manifest.choices[op_name]:
        when, found = choice.get("when") or {}, [registry.get_implementation(op_name, one) for one in choice["runs"]]
        begin = None if len(found) != 1 or found[0] is None else _reference_from(found[0])
        last = (when.get("tokens") or (None, None))[1]
        if begin is None and last is not None:
            begin = last + 1  # the rule admits none of more tokens
        begins.append(None if "not for" in choice else begin)
    return _last(begins)


def _reference_from(impl: OpImpl) -> int | None:
    return 1 if impl.kind is BackendImplKind.REFERENCE else impl.traits.reference_from


def _last(begins: Iterable[int | None]) -> int | None:
    found = list(begins)
    known = [begin for begin in found if begin is not None]
    return max(known) if found and len(known) == len(found) else None
