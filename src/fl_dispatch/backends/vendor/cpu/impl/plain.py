"""Products with plain float32 weights in this project's C++, so that memory has each weight once.

``plain.cpp`` multiplies a few rows, and PyTorch more; each call decides by its rows. PyTorch's dispatcher calls the C++
without Python, and compiled code contains the call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fl_dispatch import cpp

from .. import library
from .linear import linear as packed_by_the_wheel
from .linear import linear_reordered
from .native_calls import function

SOURCE = Path(__file__).with_name("plain.cpp")
ROWS = 48
"""Most rows for the C++, by times of single products on one processor; PyTorch multiplies more."""
LANES = 16
"""Numbers of a vector on the processors on which these products were measured."""
TORCH = (
    "aoti_torch_delete_tensor_object", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides",
    "aoti_torch_get_dtype", "aoti_torch_get_storage_size", "aoti_torch_get_storage_offset",
    "torch_get_const_data_ptr", "aoti_torch_get_data_ptr", "aoti_torch_empty_strided",
    "aoti_torch_as_strided", "aoti_torch_cpu_mm_out", "aoti_torch_cpu_addmm_out", "torch_get_num_threads",
    "aoti_torch_library_init_impl", "aoti_torch_library_impl",
)  # fmt: skip
"""Functions of PyTorch's stable interface that the C++ calls, in the order of ``Torch`` in ``plain.cpp``."""
_others: list[Callable[[Tensor, Tensor, Tensor | None], Tensor]] = [linear_reordered]
"""The product that takes other calls; a trace reads it here, because it cannot look for the wheel."""


@cache
def why_unavailable() -> str:
    """Give PyTorch the operators once in a process; return why that is impossible, or an empty string."""
    if why := cpp.why_not(SOURCE):
        return why
    try:
        pytorch = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    except OSError as error:
        return f"PyTorch's functions were not found: {error}"
    if missing := [name for name in TORCH if not hasattr(pytorch, name)]:
        return f"this PyTorch has no {', '.join(missing)}"
    if function(SOURCE, "lanes", 0)(None) != LANES:
        return f"the processor has no vectors of {LANES} numbers, with which alone these products were measured"
    table = (ctypes.c_void_p * len(TORCH))(
        *(ctypes.cast(getattr(pytorch, name), ctypes.c_void_p).value for name in TORCH)
    )
    with _lock:
        if not _installed:
            if not hasattr(torch.ops.fl_dispatch_cpu, "product"):
                _library.define("product(Tensor x, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]
                _library.define("sum(Tensor x, Tensor weight, Tensor bias) -> Tensor")  # type: ignore[no-untyped-call]
                for name in ("product", "sum"):
                    torch.library.register_fake(f"fl_dispatch_cpu::{name}", _fake, lib=_library)
            if function(SOURCE, "install")(ctypes.byref(table), ROWS):
                return "PyTorch did not take the operators"
            _installed.append(True)
    if not library.why_unavailable():
        _others[0] = packed_by_the_wheel
    return ""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :data:`fl_dispatch.ops.linear.linear`.

    Other dtypes and layouts take a packed product. A ``supports`` would say the same, but an engine's compiled code
    cannot contain a choice of implementations, so each product would be a call through Python.
    """
    if not takes(x, weight, bias):
        return _others[0](x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, weight.shape[1])
    found: Tensor
    if bias is None:
        found = torch.ops.fl_dispatch_cpu.product(rows, weight)
    else:
        found = torch.ops.fl_dispatch_cpu.sum(rows, weight, bias)
    return found if x.dim() == 2 else found.view(*x.shape[:-1], weight.shape[0])


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operators take these tensors: dense float32 matrices on the CPU, without gradients."""
    dtype, fits = weight.dtype, bias is None or (bias.is_cpu and bias.is_contiguous())
    if dtype is not torch.float32 or x.dtype is not dtype or not x.is_cpu or not weight.is_cpu or not fits:
        return False
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or weight.shape[1] == 0:
        return False
    if x.layout is not torch.strided or weight.layout is not torch.strided:
        return False
    if bias is not None and (bias.dtype is not dtype or bias.shape != weight.shape[:1]):
        return False
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return not (torch.is_grad_enabled() and trained)


def counted() -> int:
    """Return how many products the C++ computed in this process."""
    return int(function(SOURCE, "counted", 0)(None))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1])  # type: ignore[no-untyped-call]
    return x.new_empty((x.shape[0], weight.shape[0]))


_library: torch.library.Library = globals().get("_library") or torch.library.Library("fl_dispatch_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Not made again when this module is loaded again."""
_installed: list[bool] = globals().get("_installed") or []
"""Not empty once PyTorch has the operators' C++."""
_lock: threading.Lock = globals().get("_lock") or threading.Lock()
