"""Which implementations exist. One immutable mapping, replaced by writers; readers never wait."""

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
"""How similar to a declared name an operator's must be for a warning: plugins have operators of their own."""
Impls = Mapping[str, tuple[OpImpl, ...]]
_EMPTY: Impls = MappingProxyType({})


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """The registry at one moment.

    Args:
        impls_by_op: operator → its implementations in the order of registration.
        sources: the backends and plugins that registered through a registry of their own.
    """

    impls_by_op: Impls
    sources: frozenset[str] = frozenset()


class RegistryObserver(Protocol):
    """An object that follows a registry, such as a manager."""

    def admit_registration(self) -> None:
        """A change is in place; it is taken back if this raises."""

    def on_registration(self, op_names: frozenset[str]) -> None:
        """Learn that these operators have changed, or have changed back."""


class OpRegistry:
    """The implementations of every operator. Thread-safe; registration is all or nothing.

    Args:
        parent: another registry. A registration here shows here alone until :meth:`commit` adds all of them there, so
            that a backend that fails half-way leaves nothing behind.
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
        """Add several implementations: all of them, or on an error none.

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
        """Register at the parent all that was registered here, at once; from then on this is the parent.

        Args:
            aliases: further names under which the source is known from then on.

        Returns:
            The number of implementations; ``None`` where the parent has this source, by another thread, say, and
            nothing was added.

        Raises:
            RegistrationError: the parent has an implementation or a replacement of that name by now; nothing is added.
        """
        if self._parent is None:  # a backend has done it itself
            return 0
        sources = frozenset({*aliases, *filter(None, (self._source,))})
        count = None
        with writers:
            if not sources & self._parent._sources:
                for replacement in self._replacements:
                    refuse_taken_name(replacement)  # another thread may have taken it since; nothing is registered yet
                self._parent._add(tuple(self._added), self._conventions, sources)
                for replacement in self._replacements:
                    self._parent.register_replacement(replacement)
                count = len(self._added)
            self.__dict__ = self._parent.__dict__  # a backend may have kept this registry, to register more later
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
            RegistrationError: others have this name.
        """
        if self._parent is None:
            register_replacement(replacement)
        else:
            refuse_taken_name(replacement, *self._replacements)
            self._replacements.append(replacement)

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
        """How to call a registered implementation; ``None`` for an undeclared operator."""
        known = self._conventions.get(impl)
        if known is None and impl.op_name in OPERATORS:  # declared after it was registered
            known = self._conventions[impl] = convention_of(impl, OPERATORS[impl.op_name])
        return known

    def tell(self, observer: RegistryObserver) -> None:
        """Tell an object of every change from now on, as long as it lives."""
        with writers:
            self._observers.add(observer)

    def _replace(self, impls: Impls, sources: frozenset[str], op_names: frozenset[str]) -> None:
        """Make a change known to all observers, or take it back if one refuses it or is interrupted."""
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
