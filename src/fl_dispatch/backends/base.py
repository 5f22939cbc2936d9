"""The base class of backends: a chip's kernels, one method an operator."""

from __future__ import annotations

import abc
import difflib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fl_dispatch.aten_replacement import AtenReplacement
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import BackendImplKind, OpImpl

logger = get_logger(__name__)


class Registry(Protocol):
    """The part of the registry that a backend's ``register_builtins`` needs."""

    def register_many(self, impls: list[OpImpl], /) -> None:
        """Add implementations: all of them, or on an error none."""

    def register_replacement(self, replacement: AtenReplacement, /) -> None:
        """Add kernels that take the place of PyTorch's own operators."""


class Backend(abc.ABC):
    """A set of implementations that are available together.

    A subclass defines a method for each operator that it implements, named like the operator and with the parameters of
    its declaration in :data:`fl_dispatch.ops.OPERATORS`. No operator is required; a signature that does not fit is an
    error at registration.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The backend's name, such as ``ascend``."""

    @property
    def vendor(self) -> str | None:
        """The vendor's name that policies use; ``None`` for a backend that belongs to no vendor."""
        return None

    def is_available(self) -> bool:
        """Whether the backend's implementations can run on this machine.

        The method must not create a device context, because hosts fork after calling it, and a context does not survive
        a fork. Look for the library or the device file instead.
        """
        return True

    def why_unavailable(self) -> str:
        """Return why :meth:`is_available` is false, for the reasons that ``fl explain`` prints."""
        return "not available on this machine"

    def implementations(
        self,
        kind: BackendImplKind,
        impl_id: str,
        priority: int | None = None,
        supports: Mapping[str, Callable[..., bool | str]] | None = None,
        properties: Mapping[str, Any] | None = None,
        requires: Mapping[str, Any] | None = None,
        opaque: bool | None = None,
        device_types: tuple[str, ...] | None = None,
    ) -> list[OpImpl]:
        """Return an :class:`OpImpl` for each declared operator with a method here, in the catalogue's order.

        Args:
            kind: the kind of all of them.
            impl_id: the id of all of them.
            priority: see :class:`OpImpl`.
            supports: operator → predicate over its arguments, see :class:`OpImpl`.
            properties, requires, opaque, device_types: of all of them, see :class:`OpImpl`.

        Raises:
            ValueError: ``supports`` names an operator that this backend does not implement.
        """
        names = [name for name in OPERATORS if callable(getattr(self, name, None))]
        for own in vars(type(self)):
            known = own in OPERATORS or own.startswith("_")
            if not known and (near := difflib.get_close_matches(own, OPERATORS, 1, cutoff=0.85)):
                logger.warning("backend %s: method '%s' is no operator; did you mean '%s'?", self.name, own, near[0])
        predicates: Mapping[str, Callable[..., Any]] = supports or {}
        for name in predicates:
            if name not in names:
                raise ValueError(
                    f"backend {self.name}: supports names '{name}', an operator that it does not implement"
                )
        return [
            OpImpl(
                name,
                impl_id,
                kind,
                getattr(self, name),
                vendor=self.vendor,
                priority=priority,
                supports=predicates.get(name),
                available=self.is_available,
                properties=properties or {},
                requires=requires or {},
                opaque=opaque,
                device_types=device_types,
            )
            for name in names
        ]


__all__ = ["Backend", "Registry"]
