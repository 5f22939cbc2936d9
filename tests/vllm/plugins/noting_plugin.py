"""An implementation of ``scaled_linear`` that says which weights it has, as the kernel of one row does."""

from fl_dispatch import BackendImplKind, OpImpl, successors
from fl_dispatch.backends.reference.impl import quantization


def scaled_linear(x, x_scale, weight, weight_scale, bias=None, dtype="bfloat16", block_size=0):
    if x.numel() == x.shape[-1]:
        successors.after(weight)
    return quantization.scaled_linear(x, x_scale, weight, weight_scale, bias, dtype, block_size)


def register_builtins(registry):
    registry.register_many(
        [OpImpl("scaled_linear", "vendor.noting", BackendImplKind.VENDOR, scaled_linear, vendor="noting", opaque=True)]
    )
