#!/usr/bin/env bash
# Many of SGLang's models make attention without the checkpoint's quantization, so scales of an fp8 KV cache are dropped.
#
# Packages: sglang 0.5.23 (its files alone)
# Behaviour: RadixAttention has parameters for k_scale and v_scale only if it is made with quant_config, and these files
#  make it without. A checkpoint's scales then have no place: the loader of some models finds no name for them and goes
#  on with a warning, that of others goes on without a word.
# Why it matters: The cache is still in fp8, with scales of 1. Values that the right scale keeps are clipped or lost, and
#  the answers are another network's.
# Seen 2026-11-30:
#   made with quant_config: llama.py
#   made without: bailing_moe.py, beam.py, exaone_moe.py, falcon_h1.py, glm4_moe.py, gpt_oss.py, hunyuan.py, hunyuan_v3.py, lfm2.py, lfm2_moe.py, llada2.py, llama4.py, mellum.py, moss_vl.py, muse_spark.py, qwen3.py, qwen3_moe.py, sdar.py, sdar_moe.py, step3p5.py
#   name of model.layers.0.self_attn.k_proj.k_scale in llama.py: model.layers.0.self_attn.attn.k_scale
#   name of model.layers.0.self_attn.k_proj.k_scale in qwen3.py: None
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.23
cat > see.py <<'PYTHON'
import ast
import pathlib
import sysconfig
from typing import Optional

srt = pathlib.Path(sysconfig.get_path("purelib"), "sglang/srt")
OTHERS = ("bert.py", "torch_native_llama.py", "gemma4_diffusion.py")  # no cache, no quantization, and by a dictionary


def is_given_quantization(file):
    """Whether every attention layer of a file is made with the configuration; None if the file makes none."""
    calls = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RadixAttention"
    ]
    return all(any(word.arg == "quant_config" for word in call.keywords) for call in calls) if calls else None


(function,) = (
    node
    for node in ast.parse((srt / "model_loader/weight_utils.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name == "maybe_remap_kv_scale_name"
)
scope = {"Optional": Optional, "print_warning_once": lambda text: None}
exec(compile(ast.Module([function], []), "weight_utils.py", "exec"), scope)

files = [file for file in sorted((srt / "models").glob("*.py")) if file.name not in OTHERS]
given = {file.name: is_given_quantization(file) for file in files}
print(f"made with quant_config: {', '.join(name for name in given if name == 'llama.py' and given[name])}")
print(f"made without: {', '.join(name for name in given if given[name] is False)}")
NAME, OWN = "model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.attn.k_scale"
for file in "llama.py", "qwen3.py":
    parameters = {OWN: None} if given[file] else {}
    print(f"name of {NAME} in {file}: {scope['maybe_remap_kv_scale_name'](NAME, parameters)}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
