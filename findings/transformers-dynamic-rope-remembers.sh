#!/usr/bin/env bash
# With rope_type "dynamic", Transformers gives one text other logits after a longer text than before it.
#
# Packages: transformers 5.19.0, torch 2.13.0, numpy 2.3.5
# Behaviour: The frequencies of the longest text so far stay until a text comes that is shorter than the original
#  length. A text between both lengths is therefore computed by its own length in a fresh model, and by the longest
#  one's afterwards. longrope chooses anew for each text.
# Why it matters: Reference logits for a model with dynamic RoPE have to come from a fresh model, or from one that has
#  just seen a short text: else a comparison blames the engine.
# Seen 2026-11-28:
#   dynamic: the same 24 tokens, after 48 tokens: other logits; after 8 tokens: equal
#   longrope: the same 24 tokens, after 48 tokens: equal; after 8 tokens: equal
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check transformers==5.19.0 torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
ROPE = {
    "dynamic": (16, {"factor": 2.0}),
    "longrope": (
        64, {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    ),
}
for kind, (length, parameters) in ROPE.items():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=length, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    model, text = LlamaForCausalLM(config).eval(), torch.randint(0, 64, (1, 48))
    with torch.no_grad():
        first, said = model(text[:, :24]).logits, []
        for before in (48, 8):
            model(text[:, :before])
            same = torch.equal(model(text[:, :24]).logits, first)
            said.append(f"after {before} tokens: {'equal' if same else 'other logits'}")
    print(f"{kind}: the same 24 tokens, {'; '.join(said)}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
