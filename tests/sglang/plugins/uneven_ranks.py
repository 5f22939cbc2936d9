"""An implementation that only the second rank has."""

from __future__ import annotations

import torch

from fl_dispatch import BackendImplKind, OpImpl, OpRegistry


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def register_builtins(registry: OpRegistry) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        registry.register_impl(
            OpImpl("silu_and_mul", "vendor.uneven", BackendImplKind.VENDOR, silu_and_mul, vendor="uneven")
        )
