#!/usr/bin/env bash
# A cast to torch.float8_e8m0fnu rounds to the nearest power of two, so a scale may become too small; the sign is dropped.
#
# Packages: torch 2.13.0, numpy 2.3.5
# Behaviour: The cast takes the nearest power of two, and the upper one of two at equal distance; DeepSeek's rule for
#  scales of the kind ue8m0 is to round up. Below 1.5 a scale shrinks, and the largest number of its block no longer
#  fits into e4m3: it comes back as 448 scales. -4 becomes 4, 0 becomes 2^-127, and infinity becomes NaN.
# Why it matters: scale_fmt "ue8m0" of fp8 checkpoints: scales of inputs have to be rounded up before the cast,
#  because the cast alone loses the largest inputs.
# Seen 2026-11-28:
#   1.0 -> 1.0, 1.25 -> 1.0, 1.49 -> 1.0, 1.5 -> 2.0, 3.0 -> 4.0, 5.0 -> 4.0, 6.0 -> 8.0
#   -4.0 -> 4.0, 0.0 -> 5.877471754111438e-39, inf -> nan
#   the largest of a block, 627.2, comes back as 448.0 (scale by the cast) and 640.0 (scale rounded up)
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import torch


def cast(number):
    return torch.tensor(number).to(torch.float8_e8m0fnu).float()


def shown(*numbers):
    print(", ".join(f"{number} -> {cast(number).item()}" for number in numbers))


shown(1.0, 1.25, 1.49, 1.5, 3.0, 5.0, 6.0)
shown(-4.0, 0.0, float("inf"))
largest = torch.tensor(627.2)
scale = largest / 448  # 1.4
up = torch.exp2(torch.ceil(torch.log2(scale)))
back = [((largest / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s).item() for s in (cast(scale.item()), up)]
print(f"the largest of a block, {largest:.1f}, comes back as {back[0]} (scale by the cast) and {back[1]} (scale rounded up)")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
