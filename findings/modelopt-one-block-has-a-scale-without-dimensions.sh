#!/usr/bin/env bash
# Model Optimizer's scales of fp8 blocks have four dimensions, or none if a weight is one block.
#
# Packages: nvidia-modelopt 0.47.0, torch 2.13.0, transformers 5.14.1, accelerate 1.15.0, datasets 5.2.0, Python 3.11
# Behaviour: FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG has blocks of 128 by 128. export_hf_checkpoint writes weight_scale as
#  [rows, 1, columns, 1] of blocks, and as a scalar for a weight of at most 128 by 128. The configuration names the
#  format fp8_pb_wo in lower case, and the other formats in capitals. Importing the package needs requests, which it
#  does not require.
# Why it matters: A reader that unpacks two dimensions, or compares the name, fails, and for small layers only.
# Seen 2026-11-30:
#   import: No module named 'requests'
#   named: fp8_pb_wo
#   model.layers.0.mlp.down_proj: weight [128, 256], scale [1, 1, 2, 1]
#   model.layers.0.mlp.gate_proj: weight [256, 128], scale [2, 1, 1, 1]
#   model.layers.0.self_attn.o_proj: weight [128, 128], scale []
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
install() { venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 "$@"; }
install nvidia-modelopt==0.47.0
cat > write.py <<'PYTHON'
import json

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file

config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
)  # fmt: skip
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")
model = transformers.AutoModelForCausalLM.from_pretrained("model")
mtq.quantize(model, mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, lambda model: model(torch.arange(64)[None]))
export_hf_checkpoint(model, export_dir="written")
with open("written/config.json") as file:
    print("named:", json.load(file)["quantization_config"]["quant_algo"])
stored = load_file("written/model.safetensors")
for part in ("mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj"):
    name = f"model.layers.0.{part}"
    print(f"{name}: weight {[*stored[f'{name}.weight'].shape]}, scale {[*stored[f'{name}.weight_scale'].shape]}")
PYTHON
export HF_HUB_OFFLINE=1
venv/bin/python -c "import modelopt.torch" 2>log && exit 1
sed -n "s/^ModuleNotFoundError/import/p" log | tee seen
install transformers==5.14.1 accelerate==1.15.0 datasets==5.2.0 requests==2.34.2
venv/bin/python write.py 2>log >lines || { cat log; exit 1; }
grep -E "^(named|model.layers)" lines | tee -a seen
diff <(echo "$said") seen
