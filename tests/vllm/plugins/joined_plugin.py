"""Implementations of the operators that join two others, which come before the references."""

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.impl import joined


def register_builtins(registry):
    registry.register_many(
        OpImpl(name, "vendor.joined", BackendImplKind.VENDOR, getattr(joined, name), vendor="joined")
        for name in ("rms_norm_quantize", "silu_and_mul_quantize", "rotary_embedding_kv_cache_write")
    )
