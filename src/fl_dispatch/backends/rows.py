"""Tables of implementations, a row each; modules are imported when a table is registered, so that rows are data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import BackendImplKind, OpImpl, Traits


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation. A string in ``supports``, ``needs``, ``traits`` or ``requires`` is a name in its module.

    Args:
        op_name: the operator.
        at: the module below the backend's ``impl``, and the function's name after a colon where it is not the operator.
        impl_id, kind, vendor, priority, supports, requires, opaque, device_types: see :class:`OpImpl`.
        needs: checks that it can run here, asked in order; each returns why not, or an empty string.
        traits: the properties of :class:`OpImpl`.
    """

    op_name: str = field(kw_only=False)
    at: str = field(kw_only=False)
    impl_id: str
    kind: BackendImplKind
    vendor: str | None = None
    priority: int | None = None
    supports: str | None = None
    needs: tuple[Callable[[], str] | str, ...] = ()
    traits: Traits | str = field(default_factory=Traits)
    requires: Mapping[str, Any] | str = field(default_factory=dict)
    opaque: bool | None = None
    device_types: tuple[str, ...] | None = None

    @property
    def module(self) -> str:
        """The module below ``impl``."""
        return self.at.partition(":")[0]

    @property
    def function(self) -> str:
        """The function's name in the module."""
        return self.at.partition(":")[2] or self.op_name


@dataclass(frozen=True)
class Needs:
    """Checks of one implementation, as :class:`OpImpl` asks them."""

    checks: tuple[Callable[[], str], ...]

    def is_available(self) -> bool:
        """Whether every check passes."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Return the reason of the first check that fails; empty if none fails."""
        return next(filter(None, (check() for check in self.checks)), "")


def implementations(rows: Iterable[Row], package: str) -> list[OpImpl]:
    """Return the implementations of rows, and import their modules.

    Args:
        rows: of one backend.
        package: the backend's package, which has a package ``impl``.
    """
    return [_implementation(row, importlib.import_module(f"{package}.impl.{row.module}")) for row in rows]


def absent(rows: Iterable[Row]) -> list[OpImpl]:
    """Return rows of modules that cannot be imported here, with the operator's reference, so that decisions say why."""
    return [
        OpImpl(
            row.op_name,
            row.impl_id,
            row.kind,
            OPERATORS[row.op_name].reference,
            vendor=row.vendor,
            priority=row.priority,
            available=Needs(tuple(check for check in row.needs if not isinstance(check, str))).is_available,
        )
        for row in rows
    ]


def _implementation(row: Row, module: ModuleType) -> OpImpl:
    def named(value: Any) -> Any:
        return getattr(module, value) if isinstance(value, str) else value

    return OpImpl(
        row.op_name,
        row.impl_id,
        row.kind,
        getattr(module, row.function),
        vendor=row.vendor,
        priority=row.priority,
        supports=named(row.supports),
        available=Needs(tuple(map(named, row.needs))).is_available if row.needs else None,
        properties=named(row.traits),
        requires=named(row.requires),
        device_types=row.device_types,
        opaque=row.opaque,
    )
