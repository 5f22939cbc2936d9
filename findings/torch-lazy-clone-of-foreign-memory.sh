#!/usr/bin/env bash
# A lazy clone of a tensor over memory of NumPy, DLPack or a buffer ends in an internal assertion.
#
# Packages: torch 2.13.0, numpy 2.3.5
# Behaviour: torch._lazy_clone copies on write. It works on memory that PyTorch allocated. For memory that came from
#  elsewhere, also a tensor of PyTorch's own that went through DLPack and lies where it lay, it neither copies nor
#  refuses: an assertion asks the user for an enhancement request.
# Why it matters: Copy on write is how a write to a weight can be noticed. Weights that a loader took from a mapped
#  file, a NumPy array or DLPack cannot be followed, so a repacked copy of them cannot be kept.
# Seen 2026-11-28:
#   PyTorch: shares its memory until it is written: True
#   NumPy: Expected storage != nullptr to be true, but got false.
#   buffer: Expected storage != nullptr to be true, but got false.
#   DLPack: Expected storage != nullptr to be true, but got false.
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import numpy
import torch

weights = {
    "PyTorch": torch.zeros(4),
    "NumPy": torch.from_numpy(numpy.zeros(4, dtype=numpy.float32)),
    "buffer": torch.frombuffer(bytearray(16), dtype=torch.float32),
    "DLPack": torch.from_dlpack(torch.zeros(4)),
}
for name, weight in weights.items():
    try:
        clone = torch._lazy_clone(weight)
    except RuntimeError as error:
        print(f"{name}:", str(error).split("  (")[0].splitlines()[0])
    else:
        shares = torch._C._is_cow_tensor(weight) and torch._C._is_cow_tensor(clone)
        weight.add_(1)
        print(f"{name}: shares its memory until it is written: {shares and not clone.any().item()}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
