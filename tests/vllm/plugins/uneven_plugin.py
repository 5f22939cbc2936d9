"""An implementation that only the second worker process has."""

import multiprocessing

import torch

from fl_dispatch import BackendImplKind, OpImpl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def register_builtins(registry):
    if multiprocessing.current_process().name == "VllmWorker-1":
        registry.register_impl(
            OpImpl("silu_and_mul", "vendor.uneven", BackendImplKind.VENDOR, silu_and_mul, vendor="uneven")
        )
