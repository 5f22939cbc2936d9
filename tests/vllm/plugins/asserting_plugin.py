"""A cache write that ends a CUDA device as soon as it writes anything in a batch of a few tokens, such as decode."""

import torch

from fl_dispatch import BackendImplKind, OpImpl, get_default_manager

FEW = 4


def kv_cache_write(key, value, key_cache, value_cache, slot_mapping):
    if slot_mapping.shape[0] <= FEW:  # what is captured, and what runs eagerly; warm-up writes nothing
        torch._assert_async((slot_mapping < 0).all())
    right = get_default_manager().registry.get_implementation("kv_cache_write", "default.triton")
    right.fn(key, value, key_cache, value_cache, slot_mapping)


def register_builtins(registry):
    vendor = BackendImplKind.VENDOR
    registry.register_impl(
        OpImpl("kv_cache_write", "vendor.asserting", vendor, kv_cache_write, vendor="asserting", opaque=True)
    )
