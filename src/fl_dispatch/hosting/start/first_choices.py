"""The first implementations in the policy's order, and a host's questions about them before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from ... import Decision, explain, get_default_manager, get_policy
from ...compiled.manifest import Manifest
from ...devices import DeviceSpec, detect_device
from ...devices.triton import why_unserved
from ...logger_manager import get_logger
from ...ops import OPERATORS
from ...types import BackendImplKind, OpImpl

logger = get_logger(__name__)

STATES = 2
"""States that an implementation with a ``chunk`` keeps for each chunk: one before it is added, and one after it."""


def states_kept(op_name: str, tokens: int) -> int:
    """Return the most states, besides requests' own, that first choices keep for a prompt of ``tokens`` tokens."""
    chunks = (impl.traits.chunk for impl in get_default_manager().first_choices(op_name, in_layers=True))
    most: int = max((-(-tokens // chunk) * STATES for chunk in chunks if chunk), default=0)
    return most


def without_graphs(operators: Iterable[str], given: Iterable[str] = ()) -> list[OpImpl]:
    """Return first choices for these operators, called with these optional parameters, that no graph can hold."""
    manager = get_default_manager()
    firsts = (impl for op in operators for impl in manager.first_choices(op, given=given))
    return [impl for impl in firsts if not impl.traits.graphs]


def has_kernel(op_name: str, given: Iterable[str] = ()) -> bool:
    """Whether the policy prefers some implementation to PyTorch's, for some layer under some condition.

    The answer is for calls with these optional parameters.
    """
    first = get_default_manager().first_choices(op_name, in_layers=True, given=given)
    return any(impl.kind is not BackendImplKind.REFERENCE or impl.traits.batch_invariant for impl in first)


def more_than_references(decision: Decision) -> bool:
    """Whether an implementation other than a reference may run."""
    return any(impl.kind is not BackendImplKind.REFERENCE for impl in decision.candidates)


def without_kernels(operators: Iterable[str], device: DeviceSpec) -> list[str]:
    """Return the operators of layers with a state for which only references can run; hosts refuse models with them.

    A reference waits for the device in every layer. It may run on a CPU, and on an accelerator that neither a host nor
    Triton knows: :func:`warn_of_waiting` names it there.
    """
    if not device.accelerator or (device.is_foreign and why_unserved()):
        return []
    manager = get_default_manager()
    manager.ensure_initialized()
    known = manager.registry.get_implementations
    return [op for op in operators if not (known(op) and more_than_references(manager.explain(op)))]


def warn_of_waiting(operators: Iterable[str]) -> None:
    """Log the operators of which only references may run that wait for the device."""
    waiting = sorted(op for op in {*operators} if OPERATORS[op].waits and not more_than_references(explain(op)))
    if detect_device().accelerator and waiting:
        logger.warning("%s: only references, which wait for the device in every layer of a prompt", ", ".join(waiting))


def joins(joined: str, parts: Iterable[str], tokens: int | None = None) -> bool:
    """Whether calls of the parts may become calls of an operator that fuses them, for ``tokens`` tokens or any number.

    The fused operator must have first choices, none of them the reference, and the user must not choose an
    implementation of a part.
    """
    first = get_default_manager().first_choices(joined, tokens=tokens)
    better = bool(first) and all(impl.kind is not BackendImplKind.REFERENCE for impl in first)
    return better and not _ordered() & {*parts}


def of_one_backend(joined: str, parts: Iterable[str], tokens: int | None = None) -> bool:
    """Whether one backend computes a fused operator and its parts, or the user chooses the fused one's.

    The answer holds for calls of ``tokens`` tokens, or of any number.
    """
    if joined in _ordered():
        return True
    manager = get_default_manager()
    firsts = [impl for op in (joined, *parts) for impl in manager.first_choices(op, in_layers=True, tokens=tokens)]
    return len({impl.vendor or impl.impl_id for impl in firsts}) == 1


def _ordered() -> set[str]:
    """Return the operators with an order of the user's, for all layers or some."""
    return {key.partition("@")[0] for key, _ in get_policy().per_op_order}


def boundary(op_name: str) -> int | None:
    """Return the smallest number of tokens from which all first choices act like the reference, or ``None``."""
    return _last(map(_reference_from, get_default_manager().first_choices(op_name)))


def reference_from(manifest: Manifest, op_name: str, scope: str | None = None) -> int | None:
    """Return the smallest number of tokens from which frozen choices act like the reference, or ``None``."""
    registry = get_default_manager().registry
    begins = []
    for choice in manifest.choices.get(f"{op_name}@{scope}" if scope else op_name) or manifest.choices[op_name]:
        when, found = choice.get("when") or {}, [registry.get_implementation(op_name, one) for one in choice["runs"]]
        begin = None if len(found) != 1 or found[0] is None else _reference_from(found[0])
        last = (when.get("tokens") or (None, None))[1]
        if begin is None and last is not None:
            begin = last + 1  # the rule admits no call with more tokens
        begins.append(None if "not for" in choice else begin)
    return _last(begins)


def _reference_from(impl: OpImpl) -> int | None:
    return 1 if impl.kind is BackendImplKind.REFERENCE else impl.traits.reference_from


def _last(begins: Iterable[int | None]) -> int | None:
    found = list(begins)
    known = [begin for begin in found if begin is not None]
    return max(known) if found and len(known) == len(found) else None
