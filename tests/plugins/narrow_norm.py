"""An RMS norm that forgets to widen: squares in the type of the activations. Chosen only where a policy names it."""

import torch

from fl_dispatch import BackendImplKind, OpImpl


def rms_norm(x, residual=None, weight=None, eps=1e-6):
    if residual is not None:
        residual.add_(x)
        x = residual
    normed = x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return normed if residual is None else (normed, residual)


def register_builtins(registry):
    registry.register_impl(OpImpl("rms_norm", "reference.narrow", BackendImplKind.REFERENCE, rms_norm, priority=-1))
