"""States of requests in a host's memory, in the layout of our operators."""

from __future__ import annotations

from torch import Tensor

from ...devices import CPU


def delta_states(states: Tensor) -> Tensor:
    """Return the states of a delta rule as a view ``[slots, heads, key_dim, value_dim]``.

    A host shapes them ``[slots, heads, value_dim, key_dim]`` and only moves their bytes, so memory may hold the
    kernels' layout: ``[key_dim, value_dim]`` on a CPU, and the host's shape elsewhere.
    """
    if states.device.type != CPU.torch_type:
        return states.transpose(2, 3)
    slots, heads, value_dim, key_dim = states.shape
    return states.view(slots, heads, key_dim, value_dim)
