"""A gated activation in Triton's interpreter; by planted times another configuration is the fastest on each rank.

Each rank leaves its last configuration in a file of its own beside the kept tactics.
"""

import os
from itertools import count
from pathlib import Path

import torch
import torch.distributed
import triton
import triton.language as tl

from fl_dispatch import BackendImplKind, OpImpl

calls = count()


def bench(call, quantiles):
    """Seconds of the next configuration: the last one is fastest on the first rank, the first one on the others."""
    call()
    number = next(calls)
    return [float(-number if torch.distributed.get_rank() == 0 else number)] * 3


@triton.autotune([triton.Config({"BLOCK": size}) for size in (32, 64)], key=["columns"], do_bench=bench)
@triton.jit
def kernel(x, out, columns, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        gate = tl.load(x + 2 * row * columns + places, mask=places < columns)
        up = tl.load(x + (2 * row + 1) * columns + places, mask=places < columns)
        tl.store(out + row * columns + places, gate / (1 + tl.exp(-gate)) * up, mask=places < columns)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    kernel[(out[..., 0].numel(),)](x.contiguous(), out, out.shape[-1])
    ran = Path(os.environ["XDG_CACHE_HOME"], f"rank{torch.distributed.get_rank()}.txt")
    ran.write_text(str(kernel.best_config))
    return out


def register_builtins(registry):
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.timed", BackendImplKind.VENDOR, silu_and_mul, vendor="timed", opaque=True)
    )
