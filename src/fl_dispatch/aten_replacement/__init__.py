"""Backends that put their kernels in the place of PyTorch's own operators (ATen's), in this process.

A backend registers one :class:`AtenReplacement`. The plugins ask all of them through
:mod:`fl_dispatch.hosting.start.aten`; manifests and lists of operators read :func:`replaced_operators`. A backend may
put its kernels into a :mod:`.slot`; what compares calls does.
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
        native: key → how often PyTorch's ran, for a kind of arguments that is new, or because the backend raised.
        waits: the keys that graphs do not capture, because the kernel waits for the device.
        declined: key → for how many kinds of arguments the backend raised, and what; those are PyTorch's.
        wrong: key → why it was taken out.
        skipped: key → why it was never in place.
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
        """Put in place what the settings ask for and begin to learn; why nothing is, or an empty string. Idempotent."""

    def operators(self) -> Mapping[str, str]:
        """``aten::mm.out`` → the function that runs; empty where nothing is replaced."""

    def settle(self) -> Mapping[str, str]:
        """End learning: take out what was found wrong. Key → why, of everything that was taken out until now."""

    def leave(self, operators: Mapping[str, str]) -> None:
        """Take operators out, key → why; what is not in place stays as it is."""

    def resume(self, operators: Collection[str]) -> None:
        """Put back what :meth:`leave` took out, as it was."""

    def seal(self) -> None:
        """Compile and tune nothing from now on."""

    def report(self) -> ReplacementReport:
        """The state."""


_registered: dict[str, AtenReplacement] = {}
_kept: dict[str, set[str]] = {}
"""Backend → keys that it replaces, and that a list leaves to PyTorch."""


def refuse_taken_name(replacement: AtenReplacement, *others: AtenReplacement) -> None:
    """Raise :class:`RegistrationError` if one that is registered, or one of the others, has this one's name."""
    if any(other.NAME == replacement.NAME and other is not replacement for other in (*_registered.values(), *others)):
        raise RegistrationError(f"a replacement of PyTorch's operators is registered as '{replacement.NAME}' already")


def register_replacement(replacement: AtenReplacement) -> None:
    """Add a backend's replacement; the same one again, for another manager, changes nothing.

    Raises:
        RegistrationError: another one has this name.
    """
    refuse_taken_name(replacement)
    _registered[replacement.NAME] = replacement


def replacements() -> tuple[AtenReplacement, ...]:
    """Registered replacements, in the order of registration."""
    return tuple(_registered.values())


def replaced_operators() -> Mapping[str, str]:
    """``aten::mm.out`` → the function that runs, ``flag_gems.ops.mm.mm_out``; sorted."""
    return dict(sorted((key, run) for found in replacements() for key, run in found.operators().items()))


def obey(listed: Collection[str], why: str = "aten_blacklist") -> None:
    """Leave to PyTorch what a list names, ``*`` for all; what an earlier list named, and this one does not, resumes."""
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
    """``aten::mm.out`` of each operator that a backend replaces, were it not for :func:`obey`'s list; sorted."""
    return tuple(sorted(f"aten::{key}" for found in replacements() for key in _kept.get(found.NAME, ())))
