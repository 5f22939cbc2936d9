"""Load backends from outside this package: from entry points, and from modules that the user names.

A backend that the user named fails hard. A discovered backend that fails logs a WARNING, and ``fl doctor`` shows it. A
backend that fails leaves nothing half-registered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NamedTuple

from .api import why_module_refused, why_refused
from .errors import PluginLoadError, RegistrationError, text_of
from .importing import is_incomplete, is_of_incomplete_module
from .logger_manager import get_logger
from .registry import OpRegistry
from .settings import get_settings
from .types import OpImpl

logger = get_logger(__name__)

PLUGIN_GROUP = "vllm_fl.plugin"
PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"
SLOW = 5.0
"""Seconds after which an import is logged as slow, because it delays every process of a host."""
REGISTER_NAMES = ("register_builtins", "register", "vllm_fl_register")


class DiscoveredPlugin(NamedTuple):
    """A backend that was found.

    Args:
        name: name of the entry point, package or module.
        source: where it was found.
        loaded: whether it registered its implementations.
        detail: the number of implementations, or the error.
    """

    name: str
    source: str
    loaded: bool
    detail: str


class Target(NamedTuple):
    """A backend to be loaded.

    Args:
        name: name of the entry point, package or module.
        source: where the backend was found.
        load: returns a function taking the registry, or a module that has one.
        named: whether the user named the backend, so that a failure is an error.
    """

    name: str
    source: str
    load: Callable[[], object]
    named: bool


_discovered: dict[str, DiscoveredPlugin] = {}
_thread = threading.local()
"""``loads``: whether this thread runs code of a backend, in its import or its registration."""
_slow: dict[str, float] = {}


def plugins() -> list[Target]:
    """Return the plugins of the entry point group ``vllm_fl.plugin``, and the modules that the user named."""
    points = sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: (point.name, point.value))
    settings = get_settings()
    source = str(settings.origin("plugin_modules"))
    return [
        *(Target(point.name, f"entry point {point.value}", partial(_load, point), False) for point in points),
        *(Target(name, source, partial(_load_named, name), True) for name in settings.plugin_modules),
    ]


def _load(point: EntryPoint) -> object:
    if why := why_refused(point):
        raise PluginLoadError(why)
    return point.load()


def _load_named(name: str) -> object:
    """Import ``package.module`` or ``package.module:function``."""
    point = EntryPoint(name, name, PLUGIN_GROUP)
    if why := why_module_refused(point.module):
        raise PluginLoadError(why)
    return point.load()


def discover_plugins(registry: OpRegistry) -> int:
    """Load the plugins of the entry point group ``vllm_fl.plugin`` and the modules that the user named.

    Plugins that the registry already has are skipped. A call by a plugin that is being loaded does nothing, because the
    loader goes on with the other plugins anyway.

    Returns:
        The number of plugins that were loaded.

    Raises:
        PluginLoadError: a module that the user named does not load, or has no registration function.
        RegistrationError: a module that the user named registers something wrong.
    """
    if getattr(_thread, "loads", False):
        return 0
    return sum(bool(load_backend(registry, target)) for target in plugins())


@contextmanager
def _code_of_a_backend() -> Iterator[None]:
    before, _thread.loads = getattr(_thread, "loads", False), True
    try:
        yield
    finally:
        _thread.loads = before


def imported(target: Target) -> Target | None:
    """Import a target and return a copy with the result; ``None`` while this thread is importing its module.

    An import takes the lock of the module, and the module may dispatch, so a thread that holds the writers' lock never
    imports.
    """
    started = time.perf_counter()
    try:
        with _code_of_a_backend():
            found = target.load()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # plugins may raise anything: some call exit, and a panic in Rust is no Exception
        if is_of_incomplete_module(error):
            return None
        return target._replace(load=partial(_raise, error))
    finally:
        _warn_if_slow(target, time.perf_counter() - started)
    if isinstance(found, ModuleType) and is_incomplete(found):
        return None
    return target._replace(load=lambda: found)


def slow_imports() -> dict[str, float]:
    """Return the backends of this process that took long to import: name and place → seconds."""
    return dict(_slow)


def _warn_if_slow(target: Target, seconds: float) -> None:
    if seconds > SLOW:
        _slow[f"'{target.name}' ({target.source})"] = seconds
        logger.warning("Import of backend '%s' (%s) took %.1f s", target.name, target.source, seconds)


def _raise(error: BaseException) -> object:
    raise error


def load_backend(registry: OpRegistry, target: Target) -> bool | None:
    """Load one backend and register what it offers: all of it, or nothing.

    The backend's function runs without a lock, because it may import a module that another thread is importing. So two
    threads may run it, and the implementations of the first one are registered.

    Returns:
        Whether the backend was loaded now; ``None`` if it has to wait for a module that this thread is importing.

    Raises:
        PluginLoadError, RegistrationError: the backend failed, and the user named it.
    """
    name, source, load, named = target
    key = f"{source}: {name}"
    if key in registry.snapshot().sources:
        return False
    collecting = OpRegistry(registry, key)
    try:
        with _code_of_a_backend():
            function = _register_function(load(), name)
        origin = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '<unnamed>')}"
        if (
            "<" not in origin and origin in registry.snapshot().sources
        ):  # installed as a plugin, and also named as a module
            return False
        before = _implementations(registry)
        with _code_of_a_backend():
            function(collecting)
        added = _implementations(collecting) - before
        count = collecting.commit(*(() if "<" in origin else (origin,)))
        if count is None:
            return False
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # plugins may raise anything: some call exit, and a panic in Rust is no Exception
        if is_of_incomplete_module(error):
            return None
        detail = text_of(error)
        _discovered[key] = DiscoveredPlugin(name, source, False, detail)
        if isinstance(error, RegistrationError) and named:
            raise
        if named:
            raise PluginLoadError(f"{source}: plugin module '{name}' cannot be loaded: {detail}") from error
        logger.warning("Backend '%s' (%s) is not used: %s", name, source, detail)
        return False
    _discovered[key] = DiscoveredPlugin(name, source, True, f"{count} implementations")
    _say_shared_vendors(name, before, added)
    logger.debug("Backend '%s' (%s) registered %d implementations", name, source, count)
    return True


def _implementations(registry: OpRegistry) -> set[OpImpl]:
    return {impl for impls in registry.snapshot().impls_by_op.values() for impl in impls}


def _say_shared_vendors(name: str, before: set[OpImpl], added: set[OpImpl]) -> None:
    """Log two backends that use one vendor's name for an operator, because a policy cannot tell them apart.

    Backends that share a vendor's name but no operator are parts of one vendor.
    """
    holders = {(impl.vendor, impl.op_name): impl for impl in before if impl.vendor}
    shared = {impl.vendor: holders[key] for impl in added if (key := (impl.vendor, impl.op_name)) in holders}
    for vendor, holder in sorted(shared.items()):
        logger.warning(
            "Backend '%s' registers for the vendor '%s', and so does '%s' of %s: a policy that names it means both",
            name,
            vendor,
            holder.impl_id,
            holder.place,
        )


def get_discovered_plugins() -> list[DiscoveredPlugin]:
    """Return every backend that this process looked at, built-in ones included, with its outcome."""
    return list(_discovered.values())


def clear_discovered_plugins() -> None:
    """Forget all discovered backends."""
    _discovered.clear()


def _register_function(target: object, name: str) -> Callable[[Any], object]:
    if not isinstance(target, ModuleType):
        if callable(target):
            return target
        raise PluginLoadError(f"'{name}' is neither a module nor a function that takes the registry: {target!r}")
    for function_name in REGISTER_NAMES:
        function = getattr(target, function_name, None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    raise PluginLoadError(f"module '{target.__name__}' has no function {REGISTER_NAMES[0]}(registry)")
