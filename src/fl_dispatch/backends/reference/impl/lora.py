"""References of the products with adapters: every slot is multiplied, and each token takes its own.

Nothing depends on the mapping but values, so a graph holds them. A slot whose factors are not finite reaches no token
of another adapter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_dispatch.ops.lora import given


def _idle(active: Tensor) -> bool:
    """Whether no token has an adapter; compiled code must not ask, because it would keep the answer."""
    return not torch.compiler.is_compiling() and active.item() == 0


def lora_shrink(
    x: Tensor,
    out: Tensor,
    down: Tensor,
    adapters: Tensor,
    order: Tensor,
    starts: Tensor,
    active: Tensor,
    scale: float = 1.0,
    down_2: Tensor | None = None,
    down_3: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.lora.lora_shrink`."""
    if _idle(active):
        return out
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    for part, factors in enumerate(given(down, down_2, down_3)):
        product = out[part]
        for slot in range(factors.shape[0]):
            own = (wide @ factors[slot].to(wide.dtype).t() * scale).to(out.dtype)
            product = torch.where((adapters == slot)[:, None], own, product)
        out[part].copy_(product)
    return out


def lora_expand(
    y: Tensor,
    products: Tensor,
    up: Tensor,
    adapters: Tensor,
    order: Tensor,
    starts: Tensor,
    active: Tensor,
    offset: int = 0,
    up_2: Tensor | None = None,
    up_3: Tensor | None = None,
) -> Tensor:
    """See :data:`fl_dispatch.ops.lora.lora_expand`."""
    if _idle(active):
        return y
    for part, factors in enumerate(given(up, up_2, up_3)):
        end = offset + factors.shape[1]
        columns = y[:, offset:end]
        wide = products[part].to(torch.promote_types(y.dtype, torch.float32))
        total = columns
        for slot in range(factors.shape[0]):
            own = (columns + wide @ factors[slot].to(wide.dtype).t()).to(y.dtype)
            total = torch.where((adapters == slot)[:, None], own, total)
        columns.copy_(total)
        offset = end
    return y
