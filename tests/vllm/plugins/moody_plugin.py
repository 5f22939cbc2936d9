"""A wrong implementation that fails where the environment says so: one policy, but not always the same choice."""

import os

import torch

from fl_dispatch import BackendImplKind, OpImpl

FAILS = bool(os.environ.get("MOODY_FAILS"))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    if FAILS:
        raise RuntimeError("not today")
    gate, up = x.chunk(2, dim=-1)
    return gate * up


def register_builtins(registry):
    registry.register_impl(OpImpl("silu_and_mul", "vendor.moody", BackendImplKind.VENDOR, silu_and_mul, vendor="moody"))
