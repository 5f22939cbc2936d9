"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul_template(x: Tensor) -> Tensor:
    """Replace the body by the vendor's kernel, such as ``torch_vendor.swiglu(x)``.

    The kernel must not write ``x``, which may have any strides, and must return a contiguous result.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype).contiguous()
