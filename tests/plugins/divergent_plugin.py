"""An implementation that fails on one rank only."""

import torch
import torch.distributed

from fl_dispatch import BackendImplKind, OpImpl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise RuntimeError("only this rank fails")
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def register_builtins(registry):
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.divergent", BackendImplKind.VENDOR, silu_and_mul, vendor="divergent")
    )
