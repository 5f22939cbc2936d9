"""PyTorch's own operators in a worker: replaced by registered backends, sealed, reported."""

from __future__ import annotations

from collections.abc import Mapping

from ...aten_replacement import ReplacementReport, apply_blacklist, replacements
from ...devices import DeviceSpec
from ...errors import DispatchError
from ...manager import get_default_manager
from ...settings import Settings


def replace(settings: Settings, device: DeviceSpec) -> None:
    """Let every backend replace the operators that the settings name, and begin to learn. Idempotent.

    Call it after the weights are loaded, which uses PyTorch's own kernels. Every rank must call it with the same
    settings.

    Raises:
        DispatchError: two backends replace one operator, or a backend that the user named does not load.
    """
    get_default_manager().ensure_initialized()  # loads the backends, which register their replacements
    owners: dict[str, str] = {}
    for found in replacements():
        found.replace(settings, device)
        for operator in found.operators():
            if (other := owners.setdefault(operator, found.NAME)) != found.NAME:
                raise DispatchError(
                    f"{operator} is replaced by two backends, {other} and {found.NAME}: only one kernel can take the "
                    "place of PyTorch's. Take the operator out of one of them by its settings"
                )
    apply_blacklist(settings.aten_blacklist, f"aten_blacklist ({settings.origin('aten_blacklist')})")


def settle() -> dict[str, Mapping[str, str]]:
    """End learning and return backend → operator → why it was removed."""
    return {found.NAME: found.settle() for found in replacements()}


def leave(operators: Mapping[str, Mapping[str, str]]) -> None:
    """Return operators to PyTorch: backend → operator → why."""
    for found in replacements():
        found.leave(operators.get(found.NAME, {}))


def seal() -> None:
    """Stop compiling and tuning from now on."""
    for found in replacements():
        found.seal()


def is_active() -> bool:
    """Whether a backend replaces operators in this process."""
    return any(not found.report()["why_not"] for found in replacements())


def report() -> dict[str, ReplacementReport]:
    """Return backend → its state as plain data."""
    return {found.NAME: found.report() for found in replacements()}


def describe() -> str:
    """Return the report in one line."""
    return "; ".join(_line(name, found) for name, found in report().items()) or "none: no backend replaces any"


def _line(name: str, found: ReplacementReport) -> str:
    if found["why_not"]:
        return f"none by {name}: {found['why_not']}"
    called = ", ".join(f"{key} {calls}" for key, calls in found["calls"].items()) or "none"
    wrong = f"; left to PyTorch: {', '.join(found['wrong'])}" if found["wrong"] else ""
    return f"{len(found['replaced'])} replaced by {name}; called: {called}{wrong}"
