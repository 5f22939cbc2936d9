"""A right implementation under a name that a test recognises."""

import torch

from fl_dispatch import BackendImplKind, OpImpl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def register_builtins(registry):
    registry.register_impl(OpImpl("silu_and_mul", "vendor.probe", BackendImplKind.VENDOR, silu_and_mul, vendor="probe"))
