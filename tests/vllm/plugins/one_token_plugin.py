"""One vendor has a product with its norm and its gate, and all of their parts; graphs call each of them by its view."""

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import activation, fused_linear, linear, normalization, quantization

FUNCTIONS = (
    fused_linear.fused_linear,
    linear.linear,
    quantization.quantize,
    quantization.scaled_linear,
    quantization.weight_only_linear,
    normalization.rms_norm,
    activation.silu_and_mul,
)


def register_builtins(registry):
    registry.register_many(
        OpImpl(function.__name__, "vendor.one_token", BackendImplKind.VENDOR, function, vendor="one_token", opaque=True)
        for function in FUNCTIONS
    )
