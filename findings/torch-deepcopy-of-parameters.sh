#!/usr/bin/env bash
# copy.deepcopy of a parameter drops its attributes and its gradient; copies of tensors, and pickled parameters, keep attributes.
#
# Packages: torch 2.13.0, numpy 2.3.5
# Behaviour: torch.nn.Parameter has a __deepcopy__ of its own, which makes a new parameter of the cloned data alone.
#  torch.Tensor's copies __dict__ and the gradient. copy.copy and pickle keep a parameter's attributes, and a module's
#  deep copy loses those of its parameters.
# Why it matters: Hosts hang weight_loader, scales and output_dim on parameters. Code that saves and restores
#  arguments, or clones a layer, by deepcopy hands back a weight that no loader can fill again, with no error.
# Seen 2026-11-28:
#                      attribute  gradient
#   parameter deepcopy lost       lost
#   parameter copy     kept       lost
#   parameter pickle   kept       lost
#   tensor deepcopy    kept       kept
#   tensor copy        kept       lost
#   tensor pickle      kept       lost
#   module deepcopy    lost       lost
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > see.py <<'PYTHON'
import copy
import pickle

import torch


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def made(kind):
    x = kind(torch.ones(2))
    x.weight_loader, x.grad = "loader", torch.ones(2)
    return x


def shown(name, y):
    said = ["kept" if kept else "lost" for kept in (getattr(y, "weight_loader", None) == "loader", y.grad is not None)]
    print(f"{name:19}{said[0]:11}{said[1]}")


print(" " * 19 + "attribute  gradient")
for name, kind in ("parameter", torch.nn.Parameter), ("tensor", lambda x: x.requires_grad_()):
    for way in copy.deepcopy, copy.copy, pickled:
        shown(f"{name} {way.__name__.replace('pickled', 'pickle')}", way(made(kind)))
module = torch.nn.Module()
module.weight = made(torch.nn.Parameter)
shown("module deepcopy", copy.deepcopy(module).weight)
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
