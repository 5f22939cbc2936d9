"""Kernels that begin before the one in front of them has ended: programmatic dependent launch, from Hopper on.

Decoding for one request is a row of products that are bound by reading their weights, with small kernels between them
that read hardly anything. Each kernel here says at its beginning that the next one may come. Those that come early, all
for a single row, wait until what is before them has ended, before they read or write anything. A product asks for the
beginning of its columns in the meantime: that is a hint to the cache, so nothing is read too soon.

Everything that is launched early has to wait in each of its programs: what comes after it relies on that for what was
before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fl_dispatch.devices import CUDA, detect_device
from fl_dispatch.settings import get_settings

from .launch import INTERPRETED, capability

CAPABILITY = (9, 0)
"""The first compute capability that has it."""
NO, ANNOUNCES, EARLY = 0, 1, 2
"""A kernel's part in it: none, the next one may come early, and it comes early itself."""


@torch.compiler.assume_constant_result
def announcing() -> int:
    """The part of a kernel that PyTorch's compiler may launch. All GPUs of this process know of it, or none."""
    if INTERPRETED or detect_device() is not CUDA or not get_settings().chip_features:
        return NO
    found = (capability(torch.device(CUDA.torch_type, index)) for index in range(CUDA.device_count()))
    return ANNOUNCES if all(each is not None and each >= CAPABILITY for each in found) else NO


def part_of(rows: int) -> int:
    """The part of a kernel of ours that PyTorch's compiler does not see, by the rows of its argument."""
    return EARLY if (part := announcing()) and rows == 1 else part


@triton.jit
def enter(OVERLAP: tl.constexpr):
    """To be called before a kernel reads or writes anything."""
    if OVERLAP >= 1:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP >= 2:
        tl.extra.cuda.gdc_wait()


@triton.jit
def enter_product(columns, OVERLAP: tl.constexpr):
    """The same in a product, whose ``columns`` are where those of its weight begin.

    More than their first lines made steps slower on an H100: programs that come later ask for everything twice.
    """
    if OVERLAP >= 1:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP >= 2:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [columns.to(tl.int64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.extra.cuda.gdc_wait()
