#!/usr/bin/env bash
# A dispatch mode that does nothing imports PyTorch's compiler with its first operator.
#
# Packages: torch 2.13.0, numpy 2.3.5
# Behaviour: TorchDispatchMode.__init_subclass__ wraps __torch_dispatch__ with torch._disable_dynamo, and that wrapper
#  imports torch._dynamo, with sympy, when the first operator runs inside. A class that answers False to the private
#  _should_skip_dynamo is not wrapped. Neither the class's docstring nor its page says that watching costs an import.
# Why it matters: We watch which tensors of a checkpoint fill which parameters by such a mode, while a host loads
#  weights; the first operator took 1.077 s with the import and 0.000 s without, and the next ones 6.5 and 5.5 µs.
# Seen 2026-11-28:
#   wrapped: torch._dynamo imported by the first operator: True
#   asked not to: torch._dynamo imported by the first operator: False
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import sys
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Unwrapped(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


name, mode = {"1": ("wrapped", Mode), "0": ("asked not to", Unwrapped)}[sys.argv[1]]
x, before, start = torch.ones(4), "torch._dynamo" in sys.modules, time.perf_counter()
with mode():
    x.add_(1)
    first, start = time.perf_counter() - start, time.perf_counter()
    for _ in range(10000):
        x.add_(1)
print(f"{name}: first operator {first:.3f} s, then {(time.perf_counter() - start) * 100:.1f} µs each", file=sys.stderr)
print(f"{name}: torch._dynamo imported by the first operator: {not before and 'torch._dynamo' in sys.modules}")
PYTHON
found=$(venv/bin/python -W ignore see.py 1; venv/bin/python -W ignore see.py 0)
echo "$found"
[ "$found" = "$said" ]
