"""An RMS norm that divides by one element less, as a sample's variance does. Chosen only where a policy names it."""

import torch

from fl_dispatch import BackendImplKind, OpImpl


def rms_norm(x, residual=None, weight=None, eps=1e-6):
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    squares = (wide * wide).sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)
    normed = wide * torch.rsqrt(squares + eps)
    normed = (normed if weight is None else normed * weight.float()).to(x.dtype)
    return normed if residual is None else (normed, residual)


def register_builtins(registry):
    kind = BackendImplKind.REFERENCE
    registry.register_impl(OpImpl("rms_norm", "reference.sample_variance", kind, rms_norm, priority=-1))
