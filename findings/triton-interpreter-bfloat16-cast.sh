#!/usr/bin/env bash
# Triton's interpreter casts float32 to bfloat16 by cutting bits off, where compiled kernels round to the nearest.
#
# Packages: triton 3.9.0, torch 2.13.0, numpy 2.3.5
# Behaviour: With TRITON_INTERPRET=1 x.to(tl.bfloat16) cuts the lower 16 bits off. About half of all numbers differ
#  from PyTorch's cast by one place, always towards zero; the largest float32 stays finite; a number below the normal
#  range becomes ten times as large. Compiled by Triton 3.6.0 for an H200 the cast equals PyTorch's.
# Why it matters: Tests of kernels in the interpreter prove another rounding than a GPU's: about half of all results
#  differ by one place, always towards zero, so tolerances that the interpreter needs hide errors of a kernel.
# Seen 2026-11-28:
#   float32: [1.01171875, -65535.0, 3.3999999521443642e+38, 9.99994610111476e-41]
#   PyTorch: [1.015625, -65536.0, inf, 9.183549615799121e-41]
#   Triton: [1.0078125, -65280.0, 3.3895313892515355e+38, 1.0101904577379033e-39]
#   of 4096 numbers differ 2047 and are larger 0
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check triton==3.9.0 torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


def by_triton(x):
    y = torch.empty(x.numel(), dtype=torch.bfloat16)
    cast[(1,)](x, y, x.numel())
    return y


few = torch.tensor([1.01171875, -65535.0, 3.4e38, 1e-40])
print("float32:", few.tolist())
print("PyTorch:", few.to(torch.bfloat16).tolist())
print("Triton:", by_triton(few).tolist())
many = torch.randn(4096, generator=torch.Generator().manual_seed(0))
ours, theirs = by_triton(many), many.to(torch.bfloat16)
print("of 4096 numbers differ", (ours != theirs).sum().item(), "and are larger", (ours.abs() > theirs.abs()).sum().item())
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
