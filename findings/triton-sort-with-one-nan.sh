#!/usr/bin/env bash
# tl.sort and tl.topk of a row with one NaN lose numbers and return others twice.
#
# Packages: triton 3.9.0, torch 2.13.0, numpy 2.3.5
# Behaviour: PyTorch puts NaN last and keeps the other numbers. tl.sort compares pairs of places, and each place
#  decides for itself whether to swap: with NaN both comparisons are false, so both keep or both take the same number.
#  The result is no permutation of the row, and topk may miss the largest number though it is in no pair with NaN. The
#  decision is made in triton/language/standard.py (_compare_and_swap), and compiled kernels do the same: Triton 3.6.0
#  on an H200 printed these very rows.
# Why it matters: Routers and samplers choose by sorting: one NaN among the logits changes which experts or tokens win
#  among the finite ones. Our kernels take maxima in turns in place of tl.sort.
# Seen 2026-11-28:
#   row [3.0, 1.0, nan, 2.0] sorted: Triton [1.0, 2.0, 2.0, 3.0], PyTorch [1.0, 2.0, 3.0, nan]
#   row [1.0, 2.0, 3.0, nan] sorted: Triton [1.0, 2.0, 1.0, 2.0], PyTorch [1.0, 2.0, 3.0, nan]
#   row [1.0, 2.0, 3.0, nan] two largest: Triton [2.0, 1.0], PyTorch [nan, 3.0]
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
def order(x, y, top, n: tl.constexpr):
    i = tl.arange(0, n)
    row = tl.load(x + i)
    tl.store(y + i, tl.sort(row))
    tl.store(top + tl.arange(0, 2), tl.topk(row, 2))


def by_triton(x):
    y, top = torch.empty_like(x), torch.empty(2)
    order[(1,)](x, y, top, x.numel())
    return y.tolist(), top.tolist()


for numbers in ([3.0, 1.0, float("nan"), 2.0], [1.0, 2.0, 3.0, float("nan")]):
    row = torch.tensor(numbers)
    print(f"row {numbers} sorted: Triton {by_triton(row)[0]}, PyTorch {row.sort().values.tolist()}")
print(f"row {numbers} two largest: Triton {by_triton(row)[1]}, PyTorch {row.topk(2).values.tolist()}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
