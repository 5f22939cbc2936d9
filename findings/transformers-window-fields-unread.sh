#!/usr/bin/env bash
# Transformers keeps sliding_window and layer_types in configurations whose networks never read them.
#
# Packages: transformers 5.19.0, torch 2.13.0, numpy 2.3.5
# Behaviour: A Llama with a sliding_window saves and loads the field, and attends to all tokens. A Mistral with
#  layer_types that name full attention has the window in every layer all the same. Qwen 2 reads both.
# Why it matters: vLLM 0.32 gives every model the window that its file has, a Llama too, and a reader of layer_types
#  gives a Mistral's layers none: each answers long texts by another network than Transformers'. The class, and not the
#  file, says which fields count.
# Seen 2026-11-28:
#   llama, sliding_window: in the file yes, changes the logits no
#   mistral, sliding_window: in the file yes, changes the logits yes
#   mistral, layer_types: in the file yes, changes the logits no
#   qwen2, layer_types: in the file yes, changes the logits yes
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check transformers==5.19.0 torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import json

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2}
FULL, WINDOW = ["full_attention"] * 2, ["sliding_attention"] * 2
CASES = [
    (LlamaConfig, "sliding_window", {"sliding_window": None}, {"sliding_window": 4}),
    (MistralConfig, "sliding_window", {"sliding_window": None}, {"sliding_window": 4}),
    (MistralConfig, "layer_types", {"sliding_window": 4}, {"sliding_window": 4, "layer_types": FULL}),
    (
        Qwen2Config,
        "layer_types",
        {"sliding_window": 4, "use_sliding_window": True, "layer_types": WINDOW},
        {"sliding_window": 4, "use_sliding_window": True, "layer_types": FULL},
    ),
]
text = torch.arange(20)[None]


def logits(config):
    torch.manual_seed(0)
    with torch.no_grad():
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()(text).logits


for kind, field, one, other in CASES:
    config = kind(**SHAPE, **other)
    config.save_pretrained("saved")
    with open("saved/config.json") as file:
        kept = "yes" if json.load(file).get(field) else "no"
    changes = "no" if torch.equal(logits(kind(**SHAPE, **one)), logits(config)) else "yes"
    print(f"{config.model_type}, {field}: in the file {kept}, changes the logits {changes}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
