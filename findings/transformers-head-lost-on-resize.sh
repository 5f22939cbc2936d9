#!/usr/bin/env bash
# Transformers loads a head that differs from the tied embedding, and drops it when embeddings are resized to their own size.
#
# Packages: transformers 5.19.0, torch 2.13.0, numpy 2.3.5, safetensors 0.8.0
# Behaviour: tie_word_embeddings is true and the file has another lm_head.weight: loading warns that it does not tie
#  them, and save_pretrained writes both, with true in config.json. The setting still says true in memory, so
#  resize_token_embeddings, as trainers call it after adding tokens (here to the present size, where nothing changes),
#  and tie_weights tie them: the head is the embedding.
# Why it matters: What a trainer saves then is another network than what it loaded, and both are valid checkpoints. A
#  comparison of a host with Transformers must not call these methods, and the file's head is what has to be served
#  before and after.
# Seen 2026-11-28:
#   loaded: the file's head is used: True; tie_word_embeddings: True
#   saved: lm_head.weight is in the file: True; loaded again, the file's head is used: True
#   resized to 64 of 64: the file's head is used: False
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check transformers==5.19.0 torch==2.13.0 numpy==2.3.5 safetensors==0.8.0
cat > see.py <<'PYTHON'
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
)
LlamaForCausalLM(config).save_pretrained("model")
file = Path("model/model.safetensors")
head = torch.randn(64, 32)
save_file({**load_file(file), "lm_head.weight": head}, file, metadata={"format": "pt"})


def used(model):
    return f"the file's head is used: {torch.equal(model.lm_head.weight, head)}"


model = AutoModelForCausalLM.from_pretrained("model")
print(f"loaded: {used(model)}; tie_word_embeddings: {model.config.tie_word_embeddings}")
model.save_pretrained("saved")
written = "lm_head.weight" in load_file("saved/model.safetensors")
again = AutoModelForCausalLM.from_pretrained("saved")
print(f"saved: lm_head.weight is in the file: {written}; loaded again, {used(again)}")
model.resize_token_embeddings(64)
print(f"resized to 64 of 64: {used(model)}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
