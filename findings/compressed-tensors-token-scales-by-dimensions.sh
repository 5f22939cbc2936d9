#!/usr/bin/env bash
# Rows that are quantized dynamically with a scale for each token have a scale for each in three dimensions only.
#
# Packages: compressed-tensors 0.18.0, torch 2.13.0, transformers 5.19.0, numpy 2.3.5
# Behaviour: compute_dynamic_scales_and_zp with strategy "token" keeps the first two dimensions of its input. Those of
#  [texts, tokens, elements] are texts and tokens. Of [tokens, elements] none is left to reduce, which it takes for all:
#  it returns one scale for all tokens. Of [texts, 1, tokens, elements] it returns one for each text.
# Why it matters: Experts of a mixture get rows in two dimensions, so the answer of a token depends on the other tokens
#  of its expert. The input of DeepSeek's kv_b_proj in transformers has four dimensions. Hosts have a scale for each
#  token in both places, and are not as near to the library as in other linear layers.
# Seen 2026-11-29:
#   [1, 3, 8]: 3 scales
#   [3, 8]: 1 scales
#   [1, 1, 3, 8]: 1 scales
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check \
  compressed-tensors==0.18.0 torch==2.13.0 transformers==5.19.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

token = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
rows = torch.randn(3, 8)
for x in (rows[None], rows, rows[None, None]):
    scale, _ = compute_dynamic_scales_and_zp(x, token, torch.nn.Module())
    print(f"{list(x.shape)}: {scale.numel()} scales")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
