"""Implementations of the operators that join two others, which come before the references, and of some parts.

A rotation and the write of the cache are joined only where one vendor has all three.
"""

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import attention, fused, rotary


def register_builtins(registry):
    functions = (
        fused.rms_norm_quantize,
        fused.silu_and_mul_quantize,
        fused.rotary_embedding_kv_cache_write,
        rotary.rotary_embedding,
        attention.kv_cache_write,
    )
    registry.register_many(
        OpImpl(function.__name__, "vendor.joined", BackendImplKind.VENDOR, function, vendor="joined")
        for function in functions
    )
