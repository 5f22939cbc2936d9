"""Small implementations and managers for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fl_dispatch import BackendImplKind, OpImpl, OpManager, OpRegistry, SelectionPolicy, set_global_policy
from fl_dispatch.ops import OPERATORS
from fl_dispatch.run.direct import direct_function, why_declined

KINDS = {"default": BackendImplKind.DEFAULT, "vendor": BackendImplKind.VENDOR, "reference": BackendImplKind.REFERENCE}


def impl(impl_id: str, fn: Any = None, op: str = "demo", **fields: Any) -> OpImpl:
    """Return an implementation with the kind and vendor that its id has; it returns its id unless ``fn`` is given."""
    kind = KINDS[impl_id.partition(".")[0]]
    if kind is BackendImplKind.VENDOR:
        fields.setdefault("vendor", impl_id.split(".")[1])
    return OpImpl(op, impl_id, kind, fn if fn is not None else (lambda x=None: impl_id), **fields)


def manager_of(*impls: OpImpl, policy: SelectionPolicy | None = None) -> OpManager:
    """Return a manager with only these implementations."""
    set_global_policy(policy or SelectionPolicy())
    registry = OpRegistry()
    registry.register_many(impls)
    return OpManager(registry, register_builtins=False)


def as_called(register: Callable[[OpRegistry], None], op_name: str, impl_id: str) -> OpImpl:
    """Return a backend's implementation with the operator's parameters, so that it is called as the core calls it."""
    registry = OpRegistry()
    register(registry)
    found = registry.get_implementation(op_name, impl_id)
    assert found is not None
    state, operator = OpManager(registry, register_builtins=False).state, OPERATORS[op_name]

    def supports(*args: Any, **kwargs: Any) -> bool | str:
        return why_declined(state, found, operator.bind(args, kwargs)) or True

    return replace(found, fn=direct_function(state, found), supports=supports)


def failing(error: BaseException) -> Any:
    def fail(x: Any) -> Any:
        raise error

    return fail
