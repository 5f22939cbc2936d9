"""Products with weights of a vendor's own: right ones, and wrong ones that only a policy's name chooses."""

import torch

from fl_dispatch import BackendImplKind, OpImpl


def linear(x, weight, bias=None):
    y = torch.matmul(x, weight.t())
    return y if bias is None else y + bias


def wrong(x, weight, bias=None):
    return linear(x, weight, bias).roll(1, dims=-1)


def register_builtins(registry):
    for impl_id, fn, priority in (("vendor.products", linear, 100), ("vendor.wrong_products", wrong, 50)):
        kind = BackendImplKind.VENDOR
        registry.register_impl(OpImpl("linear", impl_id, kind, fn, vendor="products", priority=priority, opaque=True))
