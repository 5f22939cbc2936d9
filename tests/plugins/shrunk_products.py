"""Products with quantized weights that are 5 % too small. Chosen only where a policy names them."""

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import quantization

FACTOR = 0.95


def scaled_linear(x, x_scale, weight, weight_scale, bias=None, dtype="bfloat16", block_size=0):
    return quantization.scaled_linear(x, x_scale, weight, weight_scale * FACTOR, bias, dtype, block_size)


def weight_only_linear(x, weight, scale, zero=None, bias=None):
    return quantization.weight_only_linear(x, weight, scale * FACTOR, zero, bias)


def register_builtins(registry):
    registry.register_many(
        OpImpl(fn.__name__, "reference.shrunk", BackendImplKind.REFERENCE, fn, priority=-1)
        for fn in (scaled_linear, weight_only_linear)
    )
