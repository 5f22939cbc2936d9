"""One implementation without a choice: for callers that have chosen, measure or compare it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import NotSupported
from ..ops import OPERATORS
from ..state import Function, State
from ..types import OpImpl
from . import generated
from .arguments import Call
from .keys import CALL


def direct_function(state: State, impl: OpImpl) -> Function:
    """Return one implementation as a function with the operator's parameters, without fallback or ``supports``."""

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        raise NotSupported(f"'{impl.impl_id}' of '{impl.op_name}' does not take all of these parameters")

    operator, convention = OPERATORS.get(impl.op_name), state.registry.convention(impl)
    return generated.direct(operator, impl, convention, CALL, impl.fn, otherwise, ask=False)


def why_declined(state: State, impl: OpImpl, args: Sequence[Any]) -> str:
    """Return why a call would find that an implementation declines these arguments; empty if it takes them.

    Raises:
        Exception: any error of its ``supports``.
    """
    return Call(impl.op_name, None, tuple(args), {}).why_declined(impl, state.registry.convention(impl))
