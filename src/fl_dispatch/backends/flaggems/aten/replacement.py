"""Replace ATen operators by FlagGems' and restore them; the state belongs to the process, and a worker owns it.

FlagGems' ``enable`` and ``only_enable`` walk its table and apply its exceptions for a vendor. Here they get a registrar
that puts a :class:`.guard.Guard` into each operator's slot. Any operator can be restored at any time, because a slot
without a guard runs PyTorch's own kernel. FlagGems' log of the functions that it runs stays off: it is one file for all
processes and includes calls that replace no operator. The guards count only calls from PyTorch's dispatcher.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from fl_dispatch.aten_replacement import ReplacementReport
from fl_dispatch.aten_replacement.slot import Slot, slot_of
from fl_dispatch.backends.flaggems.library import gems
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.errors import DispatchError
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import Settings

from . import names
from .decision import why_not
from .guard import Guard, State

logger = get_logger(__name__)

NAME = "FlagGems"
"""The replacement's name; this module is an :class:`~fl_dispatch.aten_replacement.AtenReplacement`."""


@dataclass
class Installation:
    """The current replacement.

    Args:
        why_not: why no operator is replaced, as a message, or an empty string.
        asked: the settings of the decision, to detect whether a later start has other ones.
        guards: key → its guard.
        skipped: key → why FlagGems' kernel for it is not installed.
    """

    why_not: str
    asked: Any = None
    guards: dict[str, Guard] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    state: State | None = None

    def take_out(self, *keys: str) -> None:
        """Give operators back to PyTorch. Calls that already run finish with the same kernel."""
        for key in keys:
            self.slots.pop(key).guard = None

    def wrong(self) -> dict[str, str]:
        """Key → why it was given back to PyTorch; sorted."""
        return {key: guard.why_disabled for key, guard in sorted(self.guards.items()) if guard.why_disabled}

    def report(self) -> ReplacementReport:
        """Return the state as plain data."""
        running = {key: guard for key, guard in self.guards.items() if not guard.why_disabled}
        return {
            "why_not": self.why_not,
            "sealed": self.state is not None and self.state.sealed,
            "replaced": sorted(running),
            "calls": {key: guard.calls for key, guard in sorted(self.guards.items()) if guard.calls},
            "native": {key: guard.native for key, guard in sorted(self.guards.items()) if guard.native},
            "waits": sorted(key for key, guard in running.items() if guard.waits),
            "declined": {key: _declined(guard) for key, guard in sorted(running.items()) if guard.declined},
            "wrong": self.wrong(),
            "skipped": dict(sorted(self.skipped.items())),
        }


_NOTHING = "no worker has started in this process"
_current = Installation(_NOTHING)


def replace(settings: Settings, device: DeviceSpec) -> str:
    """Replace the operators that the settings select, and begin to learn; return why none is replaced, or ''.

    Idempotent; an installed replacement with another selection is removed first. Under tensor or pipeline parallelism
    every rank must call this function with the same settings.

    Raises:
        DispatchError: FlagGems does not load although a setting asks for it; without the setting this logs a WARNING.
    """
    global _current
    reason = why_not(settings, device)
    asked = _asked(settings)
    if not reason and _current.asked == asked and _current.state is not None and not _current.why_not:
        _current.state.sealed = False
        return ""
    remove()
    _current = Installation(reason, asked)
    if not reason:
        try:
            _current.why_not = _install(_current, settings, device)
        except Exception as error:  # FlagGems' import looks at devices and opens a database
            _fail(settings, error)
    if _current.why_not:
        level = logging.WARNING if _is_asked_for(settings) else logging.INFO
        logger.log(level, "ATen operators are PyTorch's own: %s", _current.why_not)
    else:
        logger.info("ATen operators of FlagGems %s: %d", _version(), len(_current.guards))
    return _current.why_not


def operators() -> Mapping[str, str]:
    """``aten::mm.out`` → FlagGems' function for it."""
    running = {key: guard.run for key, guard in _current.guards.items() if not guard.why_disabled}
    return {f"aten::{key}": f"{function.__module__}.{function.__name__}" for key, function in running.items()}


def settle() -> Mapping[str, str]:
    """Give back operators that were wrong, or right for no arguments: key → why, including earlier ones."""
    for guard in _current.guards.values():
        guard.settle()
    _current.take_out(*(key for key in list(_current.slots) if _current.guards[key].why_disabled))
    return _current.wrong()


def leave(operators: Mapping[str, str]) -> None:
    """Give operators (key → why) back to PyTorch; skip those not installed or already found wrong here."""
    new = [key for key in operators if key in _current.slots and not _current.guards[key].why_disabled]
    for key in new:
        _current.guards[key].why_disabled = operators[key]
    if new:
        logger.warning("ATen operators are left to PyTorch: %s", "; ".join(f"{key}: {operators[key]}" for key in new))
    settle()


def resume(operators: Collection[str]) -> None:
    """Reinstall operators that :func:`leave` gave back, with the kinds of arguments that they had learned."""
    for key in operators:
        if _current.state is not None and (guard := _current.guards.get(key)) is not None:
            guard.why_disabled = ""
            slot = _current.slots[key] = slot_of(key, _current.state.device.dispatch_key)
            slot.guard = guard


def seal() -> None:
    """Stop compiling and tuning: a call with a new kind of arguments runs PyTorch's kernel."""
    if _current.state is None or _current.state.sealed:
        return
    settle()
    _current.state.sealed = True
    found = _current.report()
    logger.info("ATen operators of FlagGems in place: %d; called: %d", len(found["replaced"]), len(found["calls"]))


def remove() -> None:
    """Give every operator back to PyTorch."""
    global _current
    _current.take_out(*list(_current.slots))
    _current = Installation(_NOTHING)


def report() -> ReplacementReport:
    """Return the current replacement."""
    return _current.report()


def _asked(settings: Settings) -> tuple[Any, ...]:
    return (
        settings.aten_replacement,
        settings.policy.flagos_whitelist,
        settings.policy.flagos_blacklist,
        settings.policy.strict,
    )


def _is_asked_for(settings: Settings) -> bool:
    """Whether a setting, rather than the device, asks for the replacement."""
    listed = settings.policy.flagos_whitelist
    return bool(settings.aten_replacement) if listed is None else bool(names.aten_names(listed))


def _fail(settings: Settings, error: Exception) -> None:
    """Record that FlagGems raised and that no operator is replaced."""
    why = f"FlagGems does not load: {type(error).__name__}: {error}"
    remove()
    if _is_asked_for(settings):
        raise DispatchError(f"ATen operators were to be replaced, and {why}") from error
    logger.warning("ATen operators are not replaced: %s", why)
    _current.why_not = why


def _install(installation: Installation, settings: Settings, device: DeviceSpec) -> str:
    library = gems()
    if library.device != device.torch_type:
        return f"FlagGems works on '{library.device}', this device is '{device.torch_type}'"
    table = {item[0]: name for name, items in library.FULL_CONFIG_BY_FUNC.items() for item in items}
    wanted = _wanted(installation, settings, table)
    if not wanted:
        return "the lists leave no ATen operator"
    installation.state = State(device, settings.policy.strict)
    registrar = _registrar(frozenset(wanted), installation, device.dispatch_key)
    if settings.policy.flagos_whitelist is not None:
        library.only_enable(include=names.functions_of(wanted, table), registrar=registrar)
    else:
        library.enable(unused=names.functions_without(wanted, table), registrar=registrar)
    for key in wanted - installation.guards.keys() - installation.skipped.keys():
        installation.skipped[key] = "FlagGems leaves it out on this device"
    if not installation.guards:
        key = min(wanted)
        return f"none of {len(wanted)} ATen operators could be replaced; '{key}': {installation.skipped[key]}"
    return ""


def _wanted(installation: Installation, settings: Settings, table: names.Table) -> set[str]:
    """Return the keys that the lists allow."""
    if settings.policy.flagos_whitelist is not None:
        source = str(settings.origin("flagos_whitelist"))
        wanted = names.expand_all(settings.policy.flagos_whitelist, table, source)
    else:
        source = str(settings.origin("flagos_blacklist"))
        wanted = table.keys() - names.expand_all(settings.policy.flagos_blacklist, table, source, deny=True)
    installation.skipped = {key: why for key in wanted if (why := names.why_refused(key))}
    if settings.policy.flagos_whitelist is not None and installation.skipped:
        logger.warning("%s: not replaced: %s: %s", source, ", ".join(sorted(installation.skipped)),
                       next(iter(installation.skipped.values())))  # fmt: skip
    return set(wanted) - installation.skipped.keys()


def _registrar(wanted: frozenset[str], installation: Installation, dispatch_key: str) -> type:
    """Make a subclass of FlagGems' ``Register`` that puts guards into slots."""
    register: type = importlib.import_module("flag_gems.runtime.register").Register
    state = installation.state
    assert state is not None

    def register_impl(self: Any, key: str, fn: Callable[..., Any]) -> None:
        if key not in wanted:  # another overload that the same function serves
            return
        try:
            slot = slot_of(key, dispatch_key)
        except Exception as error:  # this PyTorch lacks the operator or the kernel
            installation.skipped[key] = f"{type(error).__name__}: {error}"
            logger.debug("ATen operator '%s' is not replaced: %s", key, error)
            return
        self.all_ops.append(fn.__name__)
        self.all_keys.append(key)
        guard = installation.guards[key] = Guard(slot, fn, state)
        installation.slots[key], slot.guard = slot, guard

    return type("GuardingRegister", (register,), {"register_impl": register_impl})


def _declined(guard: Guard) -> str:
    last = next(reversed(guard.declined.values()))
    return f"{len(guard.declined)} kind{'s' if len(guard.declined) > 1 else ''} of arguments, last {last}"


@cache
def _version() -> str:
    try:
        return metadata.version("flag-gems")
    except metadata.PackageNotFoundError:
        return "of unknown version"
