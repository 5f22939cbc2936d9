#!/usr/bin/env bash
# Without a dtype in config.json, Transformers takes that of the first floating-point tensor by name for the whole model.
#
# Packages: transformers 5.19.0, torch 2.13.0, numpy 2.3.5, safetensors 0.8.0
# Behaviour: In a checkpoint in bfloat16 whose head alone is float32, lm_head.weight is the first name, so every
#  weight becomes float32. Where the norms are float32, or the embedding is float16, the model stays bfloat16. Nothing
#  is logged.
# Why it matters: fl perplexity, fl bisect and the tests compare a host with Transformers: a host that takes the dtype
#  of most weights computes in bfloat16 what Transformers computes in float32, so they differ for no fault of a
#  kernel.
# Seen 2026-11-28:
#   all bfloat16: torch.bfloat16
#   lm_head.weight float32: torch.float32
#   model.norm.weight float32: torch.bfloat16
#   model.embed_tokens.weight float16: torch.bfloat16
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check transformers==5.19.0 torch==2.13.0 numpy==2.3.5 safetensors==0.8.0
cat > see.py <<'PYTHON'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=False
)
folder = Path("model")
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
said = json.loads((folder / "config.json").read_text())
del said["dtype"]
(folder / "config.json").write_text(json.dumps(said))
weights = load_file(folder / "model.safetensors")
print("all bfloat16:", AutoModelForCausalLM.from_pretrained(folder).dtype)
for name, dtype in (
    ("lm_head.weight", torch.float32),
    ("model.norm.weight", torch.float32),
    ("model.embed_tokens.weight", torch.float16),
):
    save_file({**weights, name: weights[name].to(dtype)}, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{name} {str(dtype).removeprefix('torch.')}:", AutoModelForCausalLM.from_pretrained(folder).dtype)
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
