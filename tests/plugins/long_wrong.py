"""An activation that is wrong for more than 64 tokens, which no start-up batch of an eager engine on a CPU has."""

from __future__ import annotations

from typing import Any

import torch

from fl_dispatch import BackendImplKind, OpImpl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    result = torch.nn.functional.silu(gate) * up
    return result if x.shape[0] <= 64 else -result


def register_builtins(registry: Any) -> None:
    registry.register_impl(OpImpl("silu_and_mul", "vendor.long", BackendImplKind.VENDOR, silu_and_mul, vendor="long"))
