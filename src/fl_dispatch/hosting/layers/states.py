"""States of requests in a host's memory, as our operators have them."""

from __future__ import annotations

from torch import Tensor

from ...devices import CPU


def delta_states(states: Tensor) -> Tensor:
    """States of a delta rule ``[slots, heads, key_dim, value_dim]``, a view.

    A host shapes them ``[slots, heads, value_dim, key_dim]`` and only moves their bytes, so memory may hold them as the
    kernels want it: ``[key_dim, value_dim]`` on a CPU, and as the host shapes it elsewhere.
    """
    if states.device.type != CPU.torch_type:
        return states.transpose(2, 3)
    slots, heads, value_dim, key_dim = states.shape
    return states.view(slots, heads, key_dim, value_dim)
