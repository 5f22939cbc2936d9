"""The count of damaged logits in vLLM's runners, which goes to the host with the sampled tokens."""

from __future__ import annotations

import importlib
from typing import Any

from fl_dispatch.hosting.damage.rows import damaged_rows

PLACES = {
    False: (("vllm.v1.worker.gpu_model_runner", "count_nans_per_row"),),
    True: (("vllm.v1.worker.gpu.sample.sampler", "get_num_nans"),),
}
"""Whether it is the V2 runner → the functions by which vLLM counts, under the names that their users have."""


def install(v2: bool) -> None:
    """Have a model runner count damaged rows. Idempotent."""
    for module, name in PLACES[v2]:
        users: Any = importlib.import_module(module)
        setattr(users, name, damaged_rows)
