"""Backends that replace PyTorch's own operators (ATen's) by their kernels, in this process.

A backend registers one :class:`AtenReplacement`. The plugins ask all of them through
:mod:`fl_dispatch.hosting.start.aten`; manifests and lists of operators read :func:`replaced_operators`. A backend that
compares calls puts its kernels into a :mod:`.slot`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, TypedDict

from ..devices import DeviceSpec
from ..errors import RegistrationError
from ..settings import Settings


class ReplacementReport(TypedDict):
    """The state of a replacement as plain data. A key names an operator with its overload: ``mm.out``.

    Args:
        why_not: why nothing is replaced, or an empty string.
        sealed: whether kernels for new kinds of arguments are refused.
        replaced: the keys that run the backend's kernels, sorted.
        calls: key → how often its kernel ran.
        native: key → how often PyTorch's kernel ran, for a new kind of arguments or because the backend raised.
        waits: the keys that graphs do not capture, because the kernel waits for the device.
        declined: key → the number of kinds of arguments for which the backend raised, and the error; PyTorch runs
            these.
        wrong: key → why it was removed.
        skipped: key → why it was never installed.
    """

    why_not: str
    sealed: bool
    replaced: list[str]
    calls: dict[str, int]
    native: dict[str, int]
    waits: list[str]
    declined: dict[str, str]
    wrong: dict[str, str]
    skipped: dict[str, str]


class AtenReplacement(Protocol):
    """A backend's replacement of PyTorch's operators: state of the process. A module can be one."""

    @property
    def NAME(self) -> str:  # noqa: N802  a module's constant
        """The backend's name, for people."""

    def replace(self, settings: Settings, device: DeviceSpec) -> str:
        """Install the replacements of the settings and begin to learn; return why nothing is replaced. Idempotent."""

    def operators(self) -> Mapping[str, str]:
        """Return ``aten::mm.out`` → the function that runs; empty if nothing is replaced."""

    def settle(self) -> Mapping[str, str]:
        """End learning and remove kernels that were found wrong; return key → why, for all removed so far."""

    def leave(self, operators: Mapping[str, str]) -> None:
        """Remove operators, key → why; ignore operators that are not installed."""

    def resume(self, operators: Collection[str]) -> None:
        """Install again what :meth:`leave` removed, unchanged."""

    def seal(self) -> None:
        """Stop compiling and tuning from now on."""

    def report(self) -> ReplacementReport:
        """Return the state."""


_registered: dict[str, AtenReplacement] = {}
_kept: dict[str, set[str]] = {}
"""Backend → keys that it replaces, and that a list leaves to PyTorch."""


def refuse_taken_name(replacement: AtenReplacement, *others: AtenReplacement) -> None:
    """Raise :class:`RegistrationError` if a registered replacement, or one of the others, has this one's name."""
    if any(other.NAME == replacement.NAME and other is not replacement for other in (*_registered.values(), *others)):
        raise RegistrationError(f"a replacement of PyTorch's operators is registered as '{replacement.NAME}' already")


def register_replacement(replacement: AtenReplacement) -> None:
    """Add a backend's replacement; adding it again, for another manager, changes nothing.

    Raises:
        RegistrationError: another replacement has this name.
    """
    refuse_taken_name(replacement)
    _registered[replacement.NAME] = replacement


def replacements() -> tuple[AtenReplacement, ...]:
    """Return registered replacements, in the order of registration."""
    return tuple(_registered.values())


def replaced_operators() -> Mapping[str, str]:
    """Return ``aten::mm.out`` → the function that runs, ``flag_gems.ops.mm.mm_out``; sorted."""
    return dict(sorted((key, run) for found in replacements() for key, run in found.operators().items()))


def apply_blacklist(listed: Collection[str], why: str = "aten_blacklist") -> None:
    """Leave listed operators to PyTorch, ``*`` for all; resume those that only an earlier list named."""
    keys = {name.removeprefix("aten::").removesuffix(".default") for name in listed}
    for found in replacements():
        kept = _kept.setdefault(found.NAME, set())
        running = {key.removeprefix("aten::") for key in found.operators()}
        out = running if "*" in keys else running & keys
        back = set() if "*" in keys else kept - keys
        if out:
            found.leave(dict.fromkeys(sorted(out), why))
        if back:
            found.resume(sorted(back))
        kept.difference_update(back)
        kept.update(out)


def kept_operators() -> tuple[str, ...]:
    """Return ``aten::mm.out`` of each operator that only :func:`apply_blacklist` leaves to PyTorch; sorted."""
    return tuple(sorted(f"aten::{key}" for found in replacements() for key in _kept.get(found.NAME, ())))
