"""The registered implementations: one immutable mapping that writers replace, so that readers never wait."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from .aten_replacement import AtenReplacement, refuse_taken_name, register_replacement
from .errors import RegistrationError
from .locking import writers
from .logger_manager import get_logger
from .ops import OPERATORS
from .settings.names import near_miss, suggestion
from .signatures import Convention, convention_of
from .types import TRAITS, OpImpl

logger = get_logger(__name__)

ALMOST_SURELY = 0.9
"""Similarity to a declared operator's name that earns a warning; plugins may have operators of their own."""
Impls = Mapping[str, tuple[OpImpl, ...]]
_EMPTY: Impls = MappingProxyType({})


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """An immutable snapshot of the registry.

    Args:
        impls_by_op: operator → its implementations in the order of registration.
        sources: the backends and plugins that registered through a registry of their own.
    """

    impls_by_op: Impls
    sources: frozenset[str] = frozenset()


class RegistryObserver(Protocol):
    """An object that follows a registry, such as a manager."""

    def admit_registration(self) -> None:
        """Check a change that is already made; the registry takes it back if this raises."""

    def on_registration(self, op_names: frozenset[str]) -> None:
        """Take note of operators that changed, or changed back."""


class OpRegistry:
    """The implementations of every operator. Thread-safe; registration is all or nothing.

    Args:
        parent: another registry. Registrations stay here until :meth:`commit` adds all of them to the parent, so a
            backend that fails half-way leaves nothing there.
        source: the name of the backend that registers here.
    """

    def __init__(self, parent: OpRegistry | None = None, source: str | None = None) -> None:
        self._parent, self._source = parent, source
        self._impls: Impls = parent._impls if parent else _EMPTY
        self._sources: frozenset[str] = parent._sources if parent else frozenset()
        self._added: list[OpImpl] = []
        self._replacements: list[AtenReplacement] = []
        self._conventions: dict[OpImpl, Convention] = {}
        self._observers: weakref.WeakSet[RegistryObserver] = weakref.WeakSet()

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation.

        Raises:
            RegistrationError: the operator has an implementation with this id, or the signature does not fit.
        """
        self.register_many((impl,))

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add several implementations: all of them, or none if there is an error.

        Raises:
            RegistrationError: see :meth:`register_impl`.
        """
        new = tuple(impls)
        for impl in new:
            if not isinstance(impl, OpImpl):
                raise RegistrationError(f"an OpImpl is needed, not {impl!r}")
        for op_name in {impl.op_name for impl in new} - OPERATORS.keys():
            if meant := suggestion(op_name, cutoff=ALMOST_SURELY):
                text = "%s registers '%s', which has no declaration%s"
                logger.warning(text, self._source or "a plugin", op_name, meant)
        for impl in new:
            for key in map(str, impl.traits.extra):
                if known := near_miss(key, TRAITS):
                    text = "'%s' of op '%s' has the property '%s', which is never read; did you mean '%s'?"
                    logger.warning(text, impl.impl_id, impl.op_name, key, known)
        conventions = {impl: convention_of(impl, OPERATORS[impl.op_name]) for impl in new if impl.op_name in OPERATORS}
        self._add(new, conventions, frozenset())

    def commit(self, *aliases: str) -> int | None:
        """Move all registrations to the parent at once; later registrations go there directly.

        Args:
            aliases: further names of the source.

        Returns:
            The number of implementations; ``None`` if the parent already has this source, for example from another
            thread, and nothing was added.

        Raises:
            RegistrationError: the parent has an implementation or a replacement of that name by now; nothing is added.
        """
        if self._parent is None:  # the backend has called commit itself
            return 0
        sources = frozenset({*aliases, *filter(None, (self._source,))})
        count = None
        with writers:
            if not sources & self._parent._sources:
                for replacement in self._replacements:
                    refuse_taken_name(replacement)  # another thread may have taken the name; nothing is registered yet
                self._parent._add(tuple(self._added), self._conventions, sources)
                for replacement in self._replacements:
                    self._parent.register_replacement(replacement)
                count = len(self._added)
            self.__dict__ = self._parent.__dict__  # the backend may have kept this registry to register more later
        return count

    def _add(self, new: tuple[OpImpl, ...], conventions: Mapping[OpImpl, Convention], sources: frozenset[str]) -> None:
        with writers:
            merged = dict(self._impls)
            for impl in new:
                present = merged.get(impl.op_name, ())
                holder = next((other for other in present if other.impl_id == impl.impl_id), None)
                if holder is not None:
                    raise RegistrationError(
                        f"Duplicate impl_id '{impl.impl_id}' for op '{impl.op_name}': it is registered already, "
                        f"by {holder.place}; this one is from {impl.place}"
                        + (f" (while loading {self._source})" if self._source else "")
                        + f"; give one of them another id, such as '{impl.impl_id}.VARIANT'"
                    )
                merged[impl.op_name] = (*present, impl)
            self._conventions.update(conventions)
            try:
                names = frozenset(impl.op_name for impl in new)
                self._replace(MappingProxyType(merged), self._sources | sources, names)
            except BaseException:
                for impl in new:
                    self._conventions.pop(impl, None)
                raise
            if self._parent is not None:
                self._added += new

    def register_replacement(self, replacement: AtenReplacement) -> None:
        """Add a backend's kernels for PyTorch's own operators, for the whole process.

        Raises:
            RegistrationError: another replacement has this name.
        """
        if self._parent is None:
            register_replacement(replacement)
        else:
            refuse_taken_name(replacement, *self._replacements)
            self._replacements.append(replacement)

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """Return one implementation by its id, or ``None``."""
        return next((impl for impl in self._impls.get(op_name, ()) if impl.impl_id == impl_id), None)

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """Return all implementations of an operator in the order of registration; empty for an unknown operator."""
        return list(self._impls.get(op_name, ()))

    def list_operators(self) -> list[str]:
        """Return the names of all operators that have an implementation."""
        return list(self._impls)

    def snapshot(self) -> OpRegistrySnapshot:
        """Return the registry's current contents; later registrations do not change the snapshot."""
        return OpRegistrySnapshot(self._impls, self._sources)

    def clear(self) -> None:
        """Remove all registrations."""
        with writers:
            self._replace(_EMPTY, frozenset(), frozenset(self._impls))
            self._conventions = {}

    def convention(self, impl: OpImpl) -> Convention | None:
        """Return how to call a registered implementation; ``None`` for an undeclared operator."""
        known = self._conventions.get(impl)
        if known is None and impl.op_name in OPERATORS:  # the operator was declared after its implementation
            known = self._conventions[impl] = convention_of(impl, OPERATORS[impl.op_name])
        return known

    def add_observer(self, observer: RegistryObserver) -> None:
        """Notify an object of every change from now on, as long as it lives."""
        with writers:
            self._observers.add(observer)

    def _replace(self, impls: Impls, sources: frozenset[str], op_names: frozenset[str]) -> None:
        """Notify all observers of a change; take the change back if one refuses it or is interrupted."""
        before, observers = (self._impls, self._sources), list(self._observers)
        self._impls, self._sources = impls, sources
        try:
            for observer in observers:
                observer.admit_registration()
            for observer in observers:
                observer.on_registration(op_names)
        except BaseException:
            self._impls, self._sources = before
            for observer in observers:
                observer.on_registration(op_names)
            raise
