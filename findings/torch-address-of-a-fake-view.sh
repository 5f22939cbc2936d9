#!/usr/bin/env bash
# A view into a fake tensor has an address that is not 0, so a test of data_ptr() for 0 does not find it.
#
# Packages: torch 2.13.0, numpy 2.3.5
# Behaviour: A tensor made inside FakeTensorMode says that it is on the CPU, and data_ptr() gives 0. Of a view into it
#  data_ptr() gives the view's offset in bytes; the only sign is one warning in a process. Inside functionalize a
#  tensor's type is plain Tensor, it is on the CPU, and its address is 0 too. The storage's own address is always 0.
# Why it matters: Code that hands addresses to C or to a compiled kernel reads at 32 and the process ends, or a GPU's
#  context is lost; the usual guard, an address of 0, lets views pass. Ours asks the storage (fl_dispatch.native).
# Seen 2026-11-28:
#   fake: FakeTensor, on the CPU True, data_ptr 0, its storage's 0
#   a view into it: FakeTensor, on the CPU True, data_ptr 32, its storage's 0
#   functionalize: Tensor, on the CPU True, data_ptr 0
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

warnings.simplefilter("ignore")
with FakeTensorMode():
    fake = torch.empty(4, 8)
for name, tensor in (("fake", fake), ("a view into it", fake[1:])):
    kind, storage = type(tensor).__name__, tensor.untyped_storage().data_ptr()
    print(f"{name}: {kind}, on the CPU {tensor.is_cpu}, data_ptr {tensor.data_ptr()}, its storage's {storage}")


def seen(tensor):
    print(f"functionalize: {type(tensor).__name__}, on the CPU {tensor.is_cpu}, data_ptr {tensor.data_ptr()}")
    return tensor + 1


torch.func.functionalize(seen)(torch.ones(2))
PYTHON
found=$(venv/bin/python see.py)
echo "$found"
[ "$found" = "$said" ] || { echo "The behaviour differs from what the header says." >&2; exit 1; }
