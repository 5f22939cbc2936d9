#!/usr/bin/env bash
# One rule, and three answers to which of q, k and v it means, once a host has joined them to one layer.
#
# Packages: compressed-tensors 0.18.0, sglang 0.5.23, torch 2.13.0, transformers 5.19.0, numpy 2.3.5
# Behaviour: The library matches "re:.*v_proj" against each layer, so v_proj alone is ignored. Its own is_match for
#  joined layers says yes if any one part matches. SGLang matches the joined name where a model has no table of joined
#  layers, as Llama: "qkv_proj" ends with "v_proj", so q and k are taken for unquantized too; with "re:.*q_proj" none is.
# Why it matters: The file has packed tensors for q and k, and SGLang drops those that the layer does not know.
# Seen 2026-11-28:
#   library, ignore re:.*v_proj: q_proj False, k_proj False, v_proj True
#   library, joined: True
#   SGLang, joined, no table: True
#   SGLang, joined, re:.*q_proj, no table: False
#   SGLang, joined, with a table: ValueError
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
pip() { venv/bin/python -m pip "$@" -q --disable-pip-version-check; }
pip install compressed-tensors==0.18.0 torch==2.13.0 transformers==5.19.0 numpy==2.3.5
pip install --no-deps sglang==0.5.23
cat > see.py <<'PYTHON'
import importlib.util
import sysconfig
from pathlib import Path

import torch
from compressed_tensors.utils.match import is_match

JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
module, prefix = torch.nn.Linear(1, 1), "model.layers.0.self_attn"
parts = [f"{name} {is_match(f'{prefix}.{name}', module, 're:.*v_proj')}" for name in JOINED["qkv_proj"]]
print("library, ignore re:.*v_proj:", ", ".join(parts))
print("library, joined:", is_match(f"{prefix}.qkv_proj", module, "re:.*v_proj", fused=JOINED))

file = "sglang/srt/layers/quantization/compressed_tensors/utils.py"
spec = importlib.util.spec_from_file_location("of_sglang", Path(sysconfig.get_path("purelib")) / file)
of_sglang = importlib.util.module_from_spec(spec)
spec.loader.exec_module(of_sglang)
print("SGLang, joined, no table:", of_sglang.should_ignore_layer(f"{prefix}.qkv_proj", ["re:.*v_proj"]))
print("SGLang, joined, re:.*q_proj, no table:", of_sglang.should_ignore_layer(f"{prefix}.qkv_proj", ["re:.*q_proj"]))
try:
    print("SGLang, joined, with a table:", of_sglang.should_ignore_layer(f"{prefix}.qkv_proj", ["re:.*v_proj"], JOINED))
except ValueError:
    print("SGLang, joined, with a table: ValueError")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
