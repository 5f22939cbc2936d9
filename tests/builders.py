"""Small implementations and managers for tests."""

from __future__ import annotations

from typing import Any

from fl_dispatch import BackendImplKind, OpImpl, OpManager, OpRegistry, SelectionPolicy, set_global_policy

KINDS = {"default": BackendImplKind.DEFAULT, "vendor": BackendImplKind.VENDOR, "reference": BackendImplKind.REFERENCE}


def impl(impl_id: str, fn: Any = None, op: str = "demo", **fields: Any) -> OpImpl:
    """An implementation whose kind and vendor follow from its id; it returns its id unless told otherwise."""
    kind = KINDS[impl_id.partition(".")[0]]
    if kind is BackendImplKind.VENDOR:
        fields.setdefault("vendor", impl_id.split(".")[1])
    return OpImpl(op, impl_id, kind, fn if fn is not None else (lambda x=None: impl_id), **fields)


def manager_of(*impls: OpImpl, policy: SelectionPolicy | None = None) -> OpManager:
    """A manager with just these implementations."""
    set_global_policy(policy or SelectionPolicy())
    registry = OpRegistry()
    registry.register_many(impls)
    return OpManager(registry, register_builtins=False)


def failing(error: BaseException) -> Any:
    def fail(x: Any) -> Any:
        raise error

    return fail
