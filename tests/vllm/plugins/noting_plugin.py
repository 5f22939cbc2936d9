"""An implementation of ``linear`` that says which weights it has, as kernels of one row do."""

import torch

from fl_dispatch import BackendImplKind, OpImpl, following


def linear(x, weight, bias=None):
    if x.numel() == x.shape[-1]:
        following.after(weight)
    return torch.nn.functional.linear(x, weight, bias)


def register_builtins(registry):
    registry.register_many(
        [OpImpl("linear", "vendor.noting", BackendImplKind.VENDOR, linear, vendor="noting", opaque=True)]
    )
