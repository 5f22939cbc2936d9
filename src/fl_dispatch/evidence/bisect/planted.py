"""Implementations that are wrong on purpose, and right ones that round differently: ``fl bisect --self-test``.

The module is loaded like any plugin, ``VLLM_FL_PLUGIN_MODULES=fl_dispatch.evidence.bisect.planted``. Every operator
also gets a copy of its reference, so a search has many candidates, and all except one are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.reference.reference import ReferenceBackend
from ...ops.activation import mul_and_silu, silu_and_mul
from ...ops.attention import paged_attention
from ...ops.normalization import rms_norm
from ...ops.rotary import rotary_embedding
from ...types import BackendImplKind, OpImpl

if TYPE_CHECKING:
    from ...registry import OpRegistry

VENDOR = "planted"
DENSE = 320
"""The width of the gate and up projections of the only dense layer of the small DeepSeek model."""


def one_shape(x: Tensor) -> Tensor:
    """Wrong for one layer's shape: gate and up are swapped."""
    if x.shape[-1] == DENSE:
        return mul_and_silu.reference(x)
    return silu_and_mul.reference(x)


def bfloat16_only(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Wrong in bfloat16: the last vector of a row, eight columns, is never written."""
    result = rms_norm.reference(x, residual, weight, epsilon)
    if x.dtype is torch.bfloat16:
        y = result[0] if isinstance(result, tuple) else result
        y[..., -8:] = 0
    return result


def beyond_256(x: Tensor) -> Tensor:
    """Wrong for batches of more than 256 tokens: the grid ends there, and starts over."""
    y = silu_and_mul.reference(x)
    rows = y.view(-1, y.shape[-1])
    if len(rows) > 256:
        rows[256:] = rows[: len(rows) - 256].clone()[: len(rows) - 256]
    return y


_kept: dict[int, Tensor] = {}


def leftover(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Wrong only after another request: it reuses the positions of the first batch of the same size."""
    given = rotary_embedding.named(args, kwargs)
    positions = given["position_ids"]
    return rotary_embedding.reference(**{**given, "position_ids": _kept.setdefault(len(positions), positions.clone())})


def one_rank(x: Tensor) -> Tensor:
    """Wrong at rank 1: it uses another rank's part, and half of the columns stay zero."""
    y = silu_and_mul.reference(x)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        y[..., y.shape[-1] // 2 :] = 0
    return y


def dies(x: Tensor) -> Tensor:
    """End the process in batches of more than 256 tokens."""
    if x.numel() // x.shape[-1] > 256:
        os._exit(7)
    return silu_and_mul.reference(x)


def other_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Right, with other rounding: the mean is taken in two parts, and rounded once after the weight."""
    total = x.float() if residual is None else x.float() + residual.float()
    half = total.shape[-1] // 2
    mean = (total[..., :half].square().sum(-1, True) + total[..., half:].square().sum(-1, True)) / total.shape[-1]
    y = total / torch.sqrt(mean + epsilon)
    y = (y if weight is None else y * weight.float()).to(x.dtype)
    return y if residual is None else (y, total.to(x.dtype))


def other_silu(x: Tensor) -> Tensor:
    """Right, with other rounding: by the exponential function."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * up / (1 + torch.exp(-gate))).to(x.dtype).contiguous()


def other_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Right, with other rounding: the queries are scaled and rounded first."""
    given = paged_attention.named(args, kwargs)
    scaled = (given["query"].float() * given["scale"]).to(given["query"].dtype)
    return paged_attention.reference(**{**given, "query": scaled, "scale": 1.0})


def repeated(operator: Any, times: int) -> Callable[..., Any]:
    """Right but slow: the same is computed several times."""
    return lambda *args, **kwargs: [operator.reference(*args, **kwargs) for _ in range(times)][-1]


FAULTS: dict[str, dict[str, Any]] = {
    "one_shape": {"silu_and_mul": one_shape},
    "bfloat16_only": {"rms_norm": bfloat16_only},
    "beyond_256": {"silu_and_mul": beyond_256},
    "leftover": {"rotary_embedding": leftover},
    "one_rank": {"silu_and_mul": one_rank},
    "dies": {"silu_and_mul": dies},
    "three_times": {"paged_attention": repeated(paged_attention, 3)},
    "ten_times": {"rms_norm": repeated(rms_norm, 10)},
    "not_exact": {"rms_norm": other_norm, "silu_and_mul": other_silu, "paged_attention": other_attention},
}
"""Name → operator → implementation."""
OF_FAULTS: dict[str, Any] = {"opaque": True, "signature": "unchecked"}


def register_builtins(registry: OpRegistry) -> None:
    """Register ``vendor.planted`` for every operator, right, and ``vendor.planted.NAME`` for each fault.

    The faults are opaque, as kernels of other languages are: Dynamo would keep one side of their conditions.
    """
    registry.register_many(
        OpImpl(impl.op_name, f"vendor.{VENDOR}", BackendImplKind.VENDOR, impl.fn, vendor=VENDOR, priority=1)
        for impl in ReferenceBackend().implementations(BackendImplKind.REFERENCE, "reference.torch", 1)
    )
    registry.register_many(
        OpImpl(op, f"vendor.{VENDOR}.{name}", BackendImplKind.VENDOR, fn, vendor=VENDOR, priority=0, **OF_FAULTS)
        for name, faults in FAULTS.items()
        for op, fn in faults.items()
    )


def policy(name: str, operators: tuple[str, ...]) -> dict[str, Any]:
    """The document of the policy that runs a fault, and right copies elsewhere."""
    orders = {op: [f"impl:vendor.{VENDOR}", "reference"] for op in operators}
    orders |= {op: [f"impl:vendor.{VENDOR}.{name}", "reference"] for op in FAULTS[name]}
    return {"prefer": "reference", "op_backends": orders}
