#!/usr/bin/env bash
# SGLang's own class for OLMo 3 reads no rope_parameters: a checkpoint that Transformers 5 saved turns by another base.
#
# Packages: sglang 0.5.23 (its file alone), transformers 5.19.0, torch 2.13.0, numpy 2.3.5
# Behaviour: Transformers 5 saves rotations for each kind of layer below rope_parameters. SGLang's configuration takes
#  rope_theta and rope_scaling, the names of Transformers 4, and puts 10000 and none in the place of what it does not
#  find, without a word. The published files have the old names, so only fine-tuned or saved ones are concerned.
# Why it matters: Every token of such a model is turned by other angles (a log-probability differs by 1.5 at 5 tokens of
#  a small model). A host's class of the same name is no authority on what a file says.
# Seen 2026-11-28:
#   Transformers, full_attention: yarn, rope_theta 500000.0
#   Transformers, sliding_attention: default, rope_theta 500000.0
#   SGLang: rope_parameters None, rope_theta 10000.0
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check transformers==5.19.0 torch==2.13.0 numpy==2.3.5
venv/bin/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.23
cat > see.py <<'PYTHON'
import importlib.util
import pathlib
import sysconfig

from transformers import Olmo3Config

YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
rotations = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
Olmo3Config(rope_parameters=rotations).save_pretrained("saved")

file = pathlib.Path(sysconfig.get_path("purelib"), "sglang/srt/configs/olmo3.py")
spec = importlib.util.spec_from_file_location("olmo3_of_sglang", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

for kind, found in sorted(Olmo3Config.from_pretrained("saved").rope_parameters.items()):
    print(f"Transformers, {kind}: {found['rope_type']}, rope_theta {found['rope_theta']}")
read = module.Olmo3Config.from_pretrained("saved")
print(f"SGLang: rope_parameters {read.rope_parameters}, rope_theta {read.rope_theta}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
