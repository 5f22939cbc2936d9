"""A backend that replaces PyTorch's own operators, and is wrong in one of them on purpose: ``fl bisect --self-test``.

The module is loaded like any plugin. All replaced operators except the planted ones are PyTorch's kernels under another
name, so a search has many candidates. Three of our operators have an implementation, ``vendor.planted.aten``, that
calls operators rare in models' code; both policies run it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...aten_replacement import ReplacementReport
from ...aten_replacement.slot import Slot, slot_of
from ...devices import DeviceSpec
from ...ops.rotary import rotary_embedding
from ...settings import Settings
from ...types import BackendImplKind, OpImpl
from .planted import OF_FAULTS, VENDOR

if TYPE_CHECKING:
    from ...registry import OpRegistry

NAME = "planted"
"""The replacement's name; this module is an :class:`~fl_dispatch.aten_replacement.AtenReplacement`."""
FAULT = "FL_BISECT_PLANTED"
"""The variable with the planted fault's name."""
KEYS = (
    *("mul.Tensor", "add.Tensor", "sub.Tensor", "cat", "index.Tensor", "index_select", "gather", "lt.Scalar"),
    *("ge.Tensor", "where.self", "mm", "bmm", "silu", "sigmoid", "exp_", "log_", "cumsum.out", "uniform_"),
    *("rsqrt", "mean.dim"),
)
"""The operators that are replaced."""
Native = Callable[..., Tensor]


# -- faults: each gets PyTorch's own kernel, and the arguments of a call


def eight_bits(native: Native, x: Tensor, other: Tensor) -> Tensor:
    """Compare integers by their last eight bits."""
    return native(x, other) if x.is_floating_point() else native(x.to(torch.int8), other.to(torch.int8))


def begins_anew(native: Native, x: Tensor, dim: int, *, dtype: Any = None, out: Tensor) -> Tensor:
    """Restart the sum after a block of 128 elements."""
    native(x, dim, dtype=dtype, out=out)
    if x.dim() == 1 and len(x) > 128:
        out[128:] -= out[127].clone()
    return out


def whole_blocks(native: Native, x: Tensor) -> Tensor:
    """Leave elements that do not fill a block of 1,024 unchanged."""
    flat = x.view(-1)
    native(flat[: len(flat) // 1024 * 1024])
    return x


def without_bounds(native: Native, x: Tensor, low: float = 0, high: float = 1, **kwargs: Any) -> Tensor:
    """Draw from 0 to 1, whatever the bounds."""
    return native(x, 0, 1, **kwargs)


def not_below(native: Native, x: Tensor) -> Tensor:
    """Replace values below 2^-21 by 2^-21."""
    return native(x.clamp(min=2.0**-21))


def beside_others(native: Native, x: Tensor) -> Tensor:
    """Be wrong only if two other operators are replaced as well."""
    return native(x).add_(float({"aten::rsqrt", "aten::log_"} <= operators().keys()))


def right(native: Native, *args: Any) -> Tensor:
    """Be right."""
    return native(*args)


def late(native: Native, *args: Any, **kwargs: Any) -> Tensor:
    """Be right, after five milliseconds of other work."""
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass
    return native(*args, **kwargs)


FAULTS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "aten_comparison": {"ge.Tensor": eight_bits},
    "aten_cumsum_out": {"cumsum.out": begins_anew},
    "aten_log_": {"log_": whole_blocks},
    "aten_uniform_": {"uniform_": without_bounds},
    "aten_rsqrt": {"rsqrt": not_below},
    "aten_together": {"rsqrt": right, "log_": right, "exp_": beside_others},
    "aten_slow": {"cumsum.out": late},
}
"""Name → key of an operator → the kernel that replaces it."""


# -- the replacement


class _Kernel:
    """One operator's kernel, with the number of its calls."""

    def __init__(self, slot: Slot) -> None:
        fault = FAULTS.get(os.environ.get(FAULT, ""), {}).get(slot.key)
        self.slot, self.calls, self.why_left = slot, 0, ""
        self._run = partial(fault, slot.run_native) if fault else slot.run_native
        slot.guard = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.slot.guard = None  # PyTorch's kernel
        try:
            return self._run(*args, **kwargs)
        finally:
            self.slot.guard = self


_kernels: dict[str, _Kernel] = {}
_sealed: list[bool] = []


def replace(settings: Settings, device: DeviceSpec) -> str:
    """Replace everything, or nothing if the settings forbid it."""
    if settings.aten_replacement is False:
        return "aten_replacement is off"
    for key in KEYS:
        if key not in _kernels:
            _kernels[key] = _Kernel(slot_of(key, device.dispatch_key))
    return ""


def operators() -> Mapping[str, str]:
    """See :class:`~fl_dispatch.aten_replacement.AtenReplacement`, as for all below."""
    return {f"aten::{key}": f"{VENDOR}.{key}" for key, kernel in _kernels.items() if not kernel.why_left}


def settle() -> Mapping[str, str]:
    return {key: kernel.why_left for key, kernel in _kernels.items() if kernel.why_left}


def leave(operators: Mapping[str, str]) -> None:
    for key in operators.keys() & _kernels.keys():
        _kernels[key].slot.guard, _kernels[key].why_left = None, operators[key]


def resume(operators: Collection[str]) -> None:
    for key in operators:
        _kernels[key].slot.guard, _kernels[key].why_left = _kernels[key], ""


def seal() -> None:
    _sealed.append(True)


def report() -> ReplacementReport:
    return ReplacementReport(
        why_not="" if _kernels else "aten_replacement is off",
        sealed=bool(_sealed),
        replaced=sorted(key.removeprefix("aten::") for key in operators()),
        calls={key: kernel.calls for key, kernel in _kernels.items() if kernel.calls},
        native={},
        waits=[],
        declined={},
        wrong=dict(settle()),
        skipped={},
    )


# -- our operators, through the replaced ones


def norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Right: the mean is scaled by a power of two, and the result is perturbed by a few units."""
    total = x.float() if residual is None else x.float() + residual.float()
    root = torch.rsqrt((total.square().mean(-1, True) + epsilon) * 2.0**-20) * 2.0**-10
    y = total * root
    y = y + y * torch.empty_like(y).uniform_(-1e-6, 1e-6)
    y = (y if weight is None else y * weight.float()).to(x.dtype)
    return y if residual is None else (y, total.to(x.dtype))


def silu(x: Tensor) -> Tensor:
    """Right: through the logarithm of the gate, in place."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate).log_().exp_() * up).to(x.dtype).contiguous()


def rotary(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Right: the positions are the sums of their steps, into an argument, and none is below zero."""
    given = rotary_embedding.named(args, kwargs)
    before = given["position_ids"]
    steps = torch.diff(before, prepend=before.new_zeros(1))
    positions = torch.cumsum(steps, 0, out=torch.empty_like(before))
    zero = torch.zeros_like(positions)
    return rotary_embedding.reference(**{**given, "position_ids": torch.where(positions.ge(zero), positions, zero)})


OURS: dict[str, Callable[..., Any]] = {"rms_norm": norm, "silu_and_mul": silu, "rotary_embedding": rotary}


def register_builtins(registry: OpRegistry) -> None:
    """Register the replacement, and ``vendor.planted.aten``."""
    import sys

    registry.register_replacement(sys.modules[__name__])
    registry.register_many(
        OpImpl(op, f"vendor.{VENDOR}.aten", BackendImplKind.VENDOR, fn, vendor=VENDOR, priority=0, **OF_FAULTS)
        for op, fn in OURS.items()
    )


def policy(replaced: bool) -> dict[str, Any]:
    """Return the document of a policy that runs our operators through these PyTorch operators, replaced or not."""
    orders = {op: [f"impl:vendor.{VENDOR}.aten", "reference"] for op in OURS}
    return {"prefer": "reference", "op_backends": orders, "aten_replacement": replaced}
