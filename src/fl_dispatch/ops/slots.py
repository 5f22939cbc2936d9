"""The common part of operators with a state for each request.

A state is a row of a tensor with one row for each request that may run: a *slot*.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .declaration import (
    STANDARD_TOLERANCE,
    Access,
    Mode,
    Operator,
    Reference,
    SmallState,
    Tolerance,
    Write,
    operator,
)

MODES = frozenset({Mode.EAGER})
"""Eager only, because an opaque view that writes a state cannot return another result."""
STATE = Write(Access.STATE)
# A state is a sum over all earlier tokens, in which terms cancel, so errors scale with its largest terms: kernels that
# multiply in a half type leave four units in their last place. The mean error is what finds faults in half types.
TOLERANCES = MappingProxyType(
    {
        **STANDARD_TOLERANCE,
        torch.float64: Tolerance(1e-11, 1e-11),
        torch.float32: Tolerance(5e-5, 3e-5),
        torch.float16: Tolerance(2e-3, 4e-3),
        torch.bfloat16: Tolerance(1.6e-2, 3e-2),
    }
)


def states_bytes(states: Tensor, requests: int) -> int:
    """Return the bytes of the states of ``requests`` requests, read and written."""
    return 2 * requests * states.shape[1:].numel() * states.element_size()


def _own_states(states: Tensor, state_indices: Tensor) -> dict[str, Tensor]:
    own = torch.arange(len(state_indices), dtype=state_indices.dtype, device=state_indices.device)
    return {"states": states[state_indices.long()], "state_indices": own}


def _written_states(states: Tensor, state_indices: Tensor) -> tuple[Tensor]:
    return (states[state_indices.long()],)


SMALL_STATES = SmallState(_own_states, _written_states)
"""A call on separate states, one per request, and those states."""


def stateful(**declaration: Any) -> Callable[[Reference], Operator[Reference]]:
    """Declare an operator on states; see :func:`~fl_dispatch.ops.declaration.operator`."""
    return operator(writes={"states": STATE}, small_state=SMALL_STATES, modes=MODES, phases=True, **declaration)
