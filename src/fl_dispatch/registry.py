"""Which implementations exist. One immutable mapping, replaced by writers; readers never wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .errors import RegistrationError
from .locking import writers
from .logger_manager import get_logger
from .ops import OPERATORS
from .settings.names import suggestion
from .signatures import Convention, convention_of
from .types import OpImpl

logger = get_logger(__name__)

ALMOST_SURELY = 0.9
"""How similar to a declared name an operator's must be for a warning: plugins have operators of their own."""
Impls = Mapping[str, tuple[OpImpl, ...]]
_EMPTY: Impls = MappingProxyType({})


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """The registry at one moment.

    Args:
        impls_by_op: operator → its implementations in the order of registration.
        sources: the backends and plugins that registered through a transaction.
    """

    impls_by_op: Impls
    sources: frozenset[str] = frozenset()


class OpRegistry:
    """The implementations of every operator. Thread-safe; registration is all or nothing."""

    def __init__(self) -> None:
        self._impls: Impls = _EMPTY
        self._sources: frozenset[str] = frozenset()
        self._conventions: dict[OpImpl, Convention] = {}
        self._listeners: list[weakref.WeakMethod[Callable[[frozenset[str]], None]]] = []
        self._admitting: list[weakref.WeakMethod[Callable[[], None]]] = []

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation.

        Raises:
            RegistrationError: the operator has an implementation with this id, or the signature does not fit.
        """
        self.register_many((impl,))

    def register_many(self, impls: Iterable[OpImpl], source: str | None = None) -> None:
        """Add several implementations: all of them, or on an error none.

        Args:
            impls: what to add.
            source: name of the backend they come from, remembered so that it is not registered twice.

        Raises:
            RegistrationError: see :meth:`register_impl`.
        """
        new = tuple(impls)
        for op_name in {impl.op_name for impl in new} - OPERATORS.keys():
            if meant := suggestion(op_name, cutoff=ALMOST_SURELY):
                logger.warning("%s registers '%s', which nobody declared%s", source or "a plugin", op_name, meant)
        conventions = {impl: convention_of(impl, OPERATORS[impl.op_name]) for impl in new if impl.op_name in OPERATORS}
        with writers:
            merged = dict(self._impls)
            for impl in new:
                present = merged.get(impl.op_name, ())
                if any(other.impl_id == impl.impl_id for other in present):
                    raise RegistrationError(
                        f"Duplicate impl_id '{impl.impl_id}' for op '{impl.op_name}': it is registered already"
                        + (f" (while loading {source})" if source else "")
                    )
                merged[impl.op_name] = (*present, impl)
            sources = self._sources if source is None else self._sources | {source}
            self._conventions.update(conventions)
            try:
                self._replace(MappingProxyType(merged), sources, frozenset(impl.op_name for impl in new))
            except BaseException:
                for impl in new:
                    self._conventions.pop(impl, None)
                raise

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """One implementation by its id, or ``None``."""
        return next((impl for impl in self._impls.get(op_name, ()) if impl.impl_id == impl_id), None)

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """All implementations of an operator in the order of registration; empty for an unknown one."""
        return list(self._impls.get(op_name, ()))

    def list_operators(self) -> list[str]:
        """Names of all operators that have an implementation."""
        return list(self._impls)

    def snapshot(self) -> OpRegistrySnapshot:
        """The registry as it is now; later registrations do not show in it."""
        return OpRegistrySnapshot(self._impls, self._sources)

    def clear(self) -> None:
        """Forget everything."""
        with writers:
            self._replace(_EMPTY, frozenset(), frozenset(self._impls))
            self._conventions = {}

    def convention(self, impl: OpImpl) -> Convention | None:
        """How to call a registered implementation; ``None`` for an operator that nobody declared."""
        known = self._conventions.get(impl)
        if known is None and impl.op_name in OPERATORS:  # declared after it was registered
            known = self._conventions[impl] = convention_of(impl, OPERATORS[impl.op_name])
        return known

    def subscribe(self, listener: Callable[[frozenset[str]], None], admit: Callable[[], None] | None = None) -> None:
        """Call a bound method with the changed operators' names after every change, as long as its object lives.

        ``admit`` is called before that, with the change in place; if it raises, the change is taken back.
        """
        with writers:
            self._listeners.append(weakref.WeakMethod(listener))
            if admit is not None:
                self._admitting.append(weakref.WeakMethod(admit))

    def _replace(self, impls: Impls, sources: frozenset[str], op_names: frozenset[str]) -> None:
        """Make a change known to everybody, or take it back if somebody refuses it or is interrupted."""
        before = self._impls, self._sources
        self._impls, self._sources = impls, sources
        try:
            for admit in _alive(self._admitting):
                admit()
            for listener in _alive(self._listeners):
                listener(op_names)
        except BaseException:
            self._impls, self._sources = before
            for listener in _alive(self._listeners):
                listener(op_names)
            raise


def _alive(references: list[weakref.WeakMethod[Any]]) -> list[Callable[..., None]]:
    """The methods whose objects live; the others are dropped from the list."""
    methods = [reference() for reference in references]
    references[:] = [reference for reference, method in zip(references, methods, strict=True) if method is not None]
    return [method for method in methods if method is not None]


class Transaction:
    """Collects what one backend registers, so that a backend that fails half-way leaves nothing behind.

    It offers the registry's own methods to the backend's registration function.
    """

    def __init__(self, registry: OpRegistry, source: str) -> None:
        self._registry, self._source = registry, source
        self._collected: list[OpImpl] = []
        self._committed = False

    def register_impl(self, impl: OpImpl) -> None:
        """See :meth:`OpRegistry.register_impl`; takes effect at :meth:`commit`, after that at once."""
        self.register_many((impl,))

    def register_many(self, impls: Iterable[OpImpl], source: str | None = None) -> None:
        """See :meth:`OpRegistry.register_many`; takes effect at :meth:`commit`, after that at once."""
        if self._committed:
            self._registry.register_many(impls, source)
        else:
            self._collected.extend(impls)

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """One implementation by its id, those collected here included."""
        own = (impl for impl in self._collected if (impl.op_name, impl.impl_id) == (op_name, impl_id))
        return next(own, None) or self._registry.get_implementation(op_name, impl_id)

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """All implementations of an operator, those collected here included."""
        own = [impl for impl in self._collected if impl.op_name == op_name]
        return self._registry.get_implementations(op_name) + own

    def list_operators(self) -> list[str]:
        """Names of all operators that have an implementation, those collected here included."""
        return list(dict.fromkeys([*self._registry.list_operators(), *(impl.op_name for impl in self._collected)]))

    def snapshot(self) -> OpRegistrySnapshot:
        """The registry underneath as it is now."""
        return self._registry.snapshot()

    def commit(self, *aliases: str) -> int:
        """Register all that was collected, at once; returns how many implementations that was.

        Args:
            aliases: further names under which the source is known from then on.
        """
        self._registry.register_many(self._collected, source=self._source)
        self._committed = True
        for alias in aliases:
            self._registry.register_many((), source=alias)
        return len(self._collected)


def known_source(registry: OpRegistry, source: str) -> bool:
    """Whether a backend has been registered under this name."""
    return source in registry.snapshot().sources


__all__ = ["OpRegistry", "OpRegistrySnapshot", "RegistrationError", "Transaction"]
