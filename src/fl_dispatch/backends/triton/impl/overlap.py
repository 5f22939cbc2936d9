"""A kernel that begins while the one before it ends: programmatic dependent launch, on NVIDIA GPUs since Hopper.

Without it a kernel's programs are only sent out when the kernel before has ended and its memory is flushed, which costs
about a microsecond, in graphs too; a step of decoding is hundreds of kernels. With it they are there already, and wait.

The rule that keeps this right: a kernel that is launched so calls :func:`await_previous` before anything else, in every
program. So nothing is read or written before the kernel before it has ended, which by the same rule means all of them.
A kernel of somebody else's that is launched so has to keep the rule too; one that is launched as usual waits anyhow.
``VLLM_FL_CHIP_FEATURES=0`` launches all kernels as usual.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from fl_dispatch.settings import get_settings

from ..availability import interpreted

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton before 3.4, or one for another chip
    gdc_wait = gdc_launch_dependents = None

CAPABILITY = 9
"""The first compute capability that has it."""


@functools.cache
def overlaps(device: int) -> bool:
    """Whether kernels on a device, of which this is the index, are launched so."""
    if gdc_wait is None or interpreted() or torch.version.cuda is None or device < 0:
        return False
    if not get_settings().chip_features:
        return False
    return torch.cuda.get_device_capability(device)[0] >= CAPABILITY


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """Wait for the kernel before this one, and let the next one be sent out, which waits in the same way."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
