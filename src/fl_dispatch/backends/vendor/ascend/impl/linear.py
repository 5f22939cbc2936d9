"""Products with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import problem

DTYPES = (torch.float32, torch.float16)


def supports_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool | str:
    """Check for one dtype other than bfloat16, which the documentation does not name."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and (why := problem("npu_linear", name, tensor, DTYPES, like=x)):
            return why
    return True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`."""
    import torch_npu

    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():
        return x.new_empty(shape)
    y: Tensor = torch_npu.npu_linear(x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous(), bias)
    return y.view(shape)
